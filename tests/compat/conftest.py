"""One server process with the default model, for all clients. It has a key, and few places to generate in."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI

from kakeya.config import DEFAULT_MODEL
from kakeya.http_server import HttpServer
from support.clients import KEY, PLACES, RECALL, SINK, WINDOW, Served
from support.http_serving import start
from support.programs import NODE_FOLDER, prepare_node
from support.serving import free_port, on_loop, serve


@pytest.fixture(scope="session")
def served(default_model: Path) -> Iterator[Served]:
    http = f"127.0.0.1:{free_port()}"
    with serve(
        Path(DEFAULT_MODEL),
        *("--http", http, "--api-key", KEY),
        *("--sink", str(SINK), "--recall", str(RECALL), "--window", str(WINDOW), "--capacity", "32"),
        *("--max-concurrent", str(PLACES), "--admission", "reject"),
    ):
        yield Served(f"http://{http}/v1", DEFAULT_MODEL)


@pytest.fixture(scope="session")
def model(served: Served) -> str:
    return served.model


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    """As anybody would make one. The environment's proxies are none of its business."""
    with (
        httpx.Client(trust_env=False, timeout=60) as transport,
        OpenAI(base_url=served.url, api_key=KEY, max_retries=0, http_client=transport) as client,
    ):
        yield client


@pytest.fixture
def run_async(served: Served) -> Callable[[Callable[[AsyncOpenAI], Awaitable[None]]], None]:
    """Runs a test on an asynchronous client."""

    async def run(test: Callable[[AsyncOpenAI], Awaitable[None]]) -> None:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=60) as transport,
            AsyncOpenAI(base_url=served.url, api_key=KEY, max_retries=0, http_client=transport) as client,
        ):
            await test(client)

    return lambda test: asyncio.run(run(test))


@pytest.fixture
def loading() -> Iterator[HttpServer]:
    """A server whose model never comes: it answers 503."""
    server = start()
    yield server
    on_loop(server.drain(0))


@pytest.fixture(scope="session")
def node_modules() -> None:
    prepare_node(NODE_FOLDER)

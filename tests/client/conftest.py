"""A real server process for all tests of the client, with two API keys; and a cluster behind one address."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.client import Client
from kakeya.config import CacheConfig
from support.clustering import front_of, town_of
from support.serving import CAPACITY, ENGINE, KEY, OTHER_KEY, serve
from support.tiny import write_chat_model


@pytest.fixture(scope="module", params=["server", "cluster"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that serves, then that of a front end over two homes: no client can tell.

    Not for the whole session: the homes' threads would run on beside every test that follows.
    """
    model = write_chat_model(tmp_path_factory.mktemp("model"))
    serving = _server if request.param == "server" else _cluster
    with serving(model, tmp_path_factory.mktemp("shared")) as address:
        yield address


@contextmanager
def _server(model: Path, _: Path) -> Iterator[str]:
    keys: list[str] = []
    for key in (KEY, OTHER_KEY):
        keys += ["--api-key", key]
    shape = ["--capacity", str(CAPACITY), "--sink", "4", "--window", "128", "--threads", "1"]
    numbers = ["--dtype", "float32", "--weights", "float32", "--numerics", "exact", "--kernels", "torch"]
    with serve(model, *keys, *shape, *numbers) as address:
        yield address


@contextmanager
def _cluster(model: Path, shared: Path) -> Iterator[str]:
    """The homes have as many slabs together as the server."""
    engine = replace(ENGINE, cache=CacheConfig(sink=4, window=128))
    with (
        town_of(model, shared, "a", "b", engine=engine, capacity=CAPACITY // 2) as town,
        front_of(town, KEY, OTHER_KEY) as front,
    ):
        yield front.address


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sessions are closed after each test, so that none starves the next."""
    yield
    if "server" not in request.fixturenames:
        return
    for key in (KEY, OTHER_KEY):
        with Client(request.getfixturevalue("server"), api_key=key) as client:
            for info in client.list_sessions():
                client.session(info.session_id).close()

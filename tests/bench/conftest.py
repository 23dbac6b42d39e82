"""A tiny model with a tokenizer, and one real server process over it for all tests here."""

import asyncio
import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.bench import capacity, overhead
from kakeya.bench.server_process import ServerProcess
from kakeya.cli import main
from kakeya.client import AsyncClient, ServerInfo
from kakeya.config import CacheConfig, EngineConfig
from kakeya.types import DType, Numerics, WeightFormat
from support.cli import Outcome, Run
from support.served import write_chat_model

# A window that fills quickly, and bits that can be compared.
TINY_ENGINE = EngineConfig(
    cache=CacheConfig(sink=2, window=30),
    capacity=6,
    numerics=Numerics.EXACT,
    dtype=DType.FLOAT32,
    weights=WeightFormat.FLOAT32,
    threads=1,
)


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("bench-model"))


@pytest.fixture(scope="session")
def tiny_engine() -> EngineConfig:
    return TINY_ENGINE


@pytest.fixture(scope="session")
def tiny_server(chat_model: Path) -> Iterator[ServerProcess]:
    """With HTTP, for those who want it."""
    server = ServerProcess(str(chat_model), TINY_ENGINE, http=True)
    try:
        asyncio.run(server.ready())
        yield server
    finally:
        asyncio.run(server.stop())


@pytest.fixture
def on_shared_server(tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Benches that start a server get the one that is there, whatever flags they ask for."""

    class Shared:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        async def __aenter__(self) -> tuple[ServerProcess, ServerInfo]:
            async with AsyncClient(tiny_server.address) as client:
                return tiny_server, await client.server_info()

        async def __aexit__(self, *_: object) -> None:
            pass

    for module in (capacity, overhead):
        monkeypatch.setattr(module, "server_process", Shared)


@pytest.fixture
def kakeya_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`kakeya` in this process: its exit status and what it wrote."""

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        captured = capsys.readouterr()
        return Outcome(exit_info.value.code, captured.out, captured.err)

    return run

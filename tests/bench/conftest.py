"""A tiny model with a tokenizer, and one real server process over it for all tests here."""

import asyncio
import io
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kakeya.bench import capacity, conversation, load, overhead, processes
from kakeya.bench.benchmark import Benchmark, Results, Run as BenchRun
from kakeya.bench.processes import ServerProcess, running_server
from kakeya.cli import main
from kakeya.options import EngineOptions
from kakeya.types import DType, Numerics, WeightFormat
from support.programs import Outcome, Run
from support.tiny import write_chat_model


@pytest.fixture(scope="session", autouse=True)
def _unmeasured_servers() -> Iterator[None]:
    """The servers that benchmarks start are not traced: other tests measure their code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "_FOREIGN_PREFIX", (processes._FOREIGN_PREFIX, "COV"))
        yield


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("bench-model"))


@pytest.fixture(scope="session")
def tiny(chat_model: Path) -> dict[str, Any]:
    """Engine options: a window that fills quickly, and bits that can be compared."""
    return {
        "model": str(chat_model),
        "sink": 2,
        "window": 30,
        "numerics": Numerics.EXACT,
        "dtype": DType.FLOAT32,
        "weights": WeightFormat.FLOAT32,
        "threads": 1,
    }


@pytest.fixture(scope="session")
def tiny_server(tiny: dict[str, Any]) -> Iterator[ServerProcess]:
    """With HTTP, for those who want it."""
    # Tests see by the cached tokens whether a session was continued.
    with ServerProcess(EngineOptions(**tiny), 6, ("--share-beginnings", "off"), http=True) as server:
        asyncio.run(server.ready())
        yield server


@pytest.fixture
def on_shared_server(tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Benches that start a server get the one that is there; what they asked for is told."""
    asked: list[tuple[Any, ...]] = []

    def shared(engine: Any, capacity: int, extra: Any = (), *, http: bool = False) -> Any:
        asked.append((capacity, *extra, http))
        return running_server(tiny_server.address, tiny_server.http_address, tiny_server.pid)

    for module in (capacity, conversation, load, overhead):
        monkeypatch.setattr(module, "server_process", shared)
    return asked


class Measured:
    """A benchmark's run without the runner: its results, and what it told on the way."""

    def __init__(self, bench: Benchmark[Any], on_progress: Callable[[str], object], **settings: Any) -> None:
        self.shares: list[float] = []
        self.work: list[str] = []
        self.checkpoints: list[Results] = []

        def progress(done: float, work: str) -> None:
            self.shares.append(done)
            self.work.append(work)
            on_progress(work)

        self.run: BenchRun[Any] = BenchRun(progress, self.checkpoints.append, **settings)
        self.results: Any = self.run.stamped(bench.run(self.run))
        self.gates = {gate.name: gate for gate in bench.gates(self.results)}


@pytest.fixture(scope="session")
def measure() -> Callable[..., Measured]:
    def measured(
        bench: Benchmark[Any], on_progress: Callable[[str], object] = lambda work: None, **settings: Any
    ) -> Measured:
        return Measured(bench, on_progress, **settings)

    return measured


@pytest.fixture
def kakeya_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`kakeya` in this process: its exit status and what it wrote.

    `main` gives SIGTERM a meaning of its own, for the process; tests share theirs.
    """
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO(""))
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        captured = capsys.readouterr()
        return Outcome(exit_info.value.code, captured.out, captured.err)

    yield run
    signal.signal(signal.SIGTERM, before)

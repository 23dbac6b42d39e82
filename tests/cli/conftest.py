import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.cli import main, opening
from kakeya.config import CacheConfig, EngineConfig
from kakeya.runtime import Runtime
from support.cli import Outcome, Run


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`kakeya` in this process: its exit status and what it wrote."""

    def run(*arguments: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        captured = capsys.readouterr()
        return Outcome(exit_info.value.code, captured.out, captured.err)

    return run


class SharedRuntime(Runtime):
    """Stays open when a verb is done with it. Its sessions must all be closed by then, or slabs run out."""

    def __exit__(self, *_: object) -> None:
        for session in self.list_sessions()[0]:
            self.close_session(session.session_id)


@pytest.fixture(scope="session")
def runtime(default_model: Path) -> Iterator[SharedRuntime]:
    """The real model with a memory of 128 tokens, loaded once for all tests here."""
    config = EngineConfig(cache=CacheConfig(sink=4, window=124), capacity=2, threads=2)
    runtime = SharedRuntime.open(config=config)
    yield runtime
    runtime.close()


@pytest.fixture
def shared_runtime(runtime: SharedRuntime, monkeypatch: pytest.MonkeyPatch) -> SharedRuntime:
    """Verbs that open a runtime get the shared one, whatever settings they ask for."""
    monkeypatch.setattr(opening, "open_runtime", lambda screen, model, config: runtime)
    return runtime

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.cli import opening
from kakeya.config import CacheConfig, EngineConfig
from kakeya.runtime import Runtime


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


@pytest.fixture
def usual_logs() -> Iterator[None]:
    """`serve` takes over the logs; give them back."""
    loggers = [logging.getLogger(name) for name in ("kakeya", "grpc", "asyncio", "uvicorn")]
    states = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, states, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)

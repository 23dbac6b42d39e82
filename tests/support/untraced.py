"""Work that coverage's tracer leaves alone. It slows all Python code down, also what is not measured."""

import os
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def importing(*packages: str) -> str:
    """The beginning of a program that is measured: foreign packages are imported without the tracer."""
    imports = f"import {', '.join(packages)}"
    return f"import sys; tracer = sys.gettrace(); sys.settrace(None); {imports}; sys.settrace(tracer)\n"


KAKEYA = importing("torch") + "from kakeya.cli import main; main()\n"
"""`kakeya` as a program for `python -c`."""


def untraced(work: Callable[[], T]) -> T:
    """What `work` gives. Only this thread is left alone."""
    tracer = sys.gettrace()
    sys.settrace(None)
    try:
        return work()
    finally:
        sys.settrace(tracer)


@contextmanager
def unwatched() -> Iterator[None]:
    """Coverage watches neither this thread nor those that it starts."""
    tracer, of_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        sys.settrace(tracer)
        threading.settrace(of_threads)  # type: ignore[arg-type]


class OnlyTests:
    """A plugin of pytest: coverage watches tests and fixtures, and not pytest's own work between them."""

    _tracer: Any = None

    @contextmanager
    def _tracing(self, tracer: Any) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            yield
        finally:
            sys.settrace(before)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, Any, Any]:
        self._tracer = sys.gettrace()  # coverage may have begun just now
        with self._tracing(None):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, request: pytest.FixtureRequest) -> Generator[None, Any, Any]:
        """What an unwatched test or file starts for itself alone is as unwatched."""
        if request.node.get_closest_marker("unwatched") is not None:
            with unwatched():
                return (yield)
        with self._tracing(self._tracer):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self) -> Generator[None, Any, Any]:
        with self._tracing(self._tracer):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, Any, Any]:
        """Fixtures end here."""
        with self._tracing(self._tracer):
            return (yield)


def untraced_environment() -> dict[str, str]:
    """The environment of a process that is not measured."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COV")}

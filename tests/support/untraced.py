"""Work that coverage's tracer leaves alone. It slows all Python code down, also what is not measured."""

import os
import sys
from collections.abc import Callable
from typing import TypeVar

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


def untraced_environment() -> dict[str, str]:
    """The environment of a process that is not measured."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COV")}

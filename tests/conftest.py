"""What every test may use: models, `kakeya` in this process, quiet threads, no surprises by hypothesis."""

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from inspect import signature
from pathlib import Path

import hypothesis
import pytest
import torch

from kakeya.config import DEFAULT_MODEL
from kakeya.models import catalogue
from kakeya.runtime import Runtime
from support import tiny
from support.programs import Outcome, Run
from support.tiny import tiny_runtime
from support.untraced import OnlyTests, untraced, unwatched

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

# Products this small only lose by being shared out, and other test processes use the other cores.
torch.set_num_threads(1)

# On a CPU, MLX runs a C++ compiler for each kernel that it fuses. Whoever tests that enables it.
with suppress(ImportError):  # a machine with a GPU need not have it
    import_module("mlx.core").disable_compile()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests over the real model are slow; others say so themselves."""
    for item in items:
        if "default_model" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OnlyTests())


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call an untraced or unwatched test without coverage's tracer."""
    given = {name: pyfuncitem.funcargs[name] for name in signature(pyfuncitem.obj).parameters}
    if pyfuncitem.get_closest_marker("unwatched") is not None:
        with unwatched():
            pyfuncitem.obj(**given)
    elif pyfuncitem.get_closest_marker("untraced") is not None:
        untraced(lambda: pyfuncitem.obj(**given))
    else:
        return None
    return True


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The real default model. It comes through our own code and stays in the user's cache directory."""
    return catalogue.resolve(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a tiny random checkpoint."""
    return tiny.write_llama(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def open_tiny(tiny_model: Path) -> Iterator[Callable[..., Runtime]]:
    """Opens runtimes over the tiny model; they are closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(tiny_runtime(tiny_model, *args, **options))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`kakeya` in this process: its exit status and what it wrote.

    `main` gives SIGTERM a meaning of its own, for the process; tests share theirs.
    """
    from kakeya.cli import main  # a GPU machine may lack what it needs

    usual = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as exit_info:
            main(arguments)
        captured = capsys.readouterr()
        return Outcome(exit_info.value.code, captured.out, captured.err)

    yield run
    signal.signal(signal.SIGTERM, usual)


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    """Products this small only lose by being shared out."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

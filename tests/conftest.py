"""What every test may use: the default model, quiet threads, and hypothesis without surprises."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import hypothesis
import pytest
import torch

from kakeya.config import DEFAULT_MODEL
from kakeya.models import catalogue
from kakeya.runtime import Runtime
from support import tiny
from support.runtimes import tiny_runtime

# Tests never look a model up on a hub; libraries that would like to are told so.
os.environ["HF_HUB_OFFLINE"] = "1"
# Nor do they find the models that a developer has in the hub's own cache.
os.environ["HF_HUB_CACHE"] = "/nonexistent"

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

torch.set_num_threads(2)


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

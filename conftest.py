"""How a process that runs tests is set up, before anything else is imported there."""

import atexit
import gc
import os
import signal
import sys
from collections.abc import Generator
from contextlib import suppress
from importlib import import_module
from typing import Any

import pytest

from support.untraced import untraced

# Until all tests are collected nothing of it is garbage.
gc.disable()

# A shell's background and nohup hand signals down ignored, and processes hand them on. Tests press Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests never look a model up on a hub; libraries that would like to are told so.
os.environ["HF_HUB_OFFLINE"] = "1"
# Nor do they find the models that a developer has in the hub's own cache.
os.environ["HF_HUB_CACHE"] = "/nonexistent"
# Torch's threads sleep while they wait: several processes share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


# What takes long to import: here, and where tests are collected.
_FOREIGN = ("torch", "fastapi", "grpc.aio")
_COLLECTED = (
    "transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto", "scipy.stats",
    "schemathesis", "openai", "langchain_openai", "playwright.sync_api", "huggingface_hub", "gguf",
)  # fmt: skip


def _import_foreign() -> None:
    for package in _FOREIGN + (_COLLECTED if "PYTEST_XDIST_WORKER" in os.environ else ()):
        with suppress(ImportError):
            import_module(package)


if sys.gettrace() is not None:
    untraced(_import_foreign)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported and collected stays to the end: later searches for garbage leave it alone."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _end() -> None:
    """The end of a process frees all, and MLX looks whether it did. A worker's end is nobody's business: what
    it measured and found has been told, and to free all would take seconds."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(0)
    gc.unfreeze()


atexit.register(_end)

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from kakeya.kernels import Kernels, load
from kakeya.types import KernelChoice

ISAS = ("avx512-vnni", "avx2", "neon-dotprod", "generic")


@pytest.fixture(autouse=True)
def calm_torch(one_torch_thread: None) -> None:
    """One seed, and one thread for the many tiny products of the references."""
    torch.manual_seed(20)


@pytest.fixture(scope="session")
def native() -> ModuleType:
    """The extension module itself, which can be told to use another instruction set."""
    module: ModuleType = pytest.importorskip(
        "kakeya.kernels._native", reason="the native kernels are not built here"
    )
    return module


@pytest.fixture
def best(native: ModuleType) -> Iterator[Kernels]:
    """The kernels for this processor, on two threads."""
    kernels = load(KernelChoice.NATIVE)
    assert kernels is not None
    isa, threads = kernels.isa, kernels.threads
    kernels.set_threads(2)
    yield kernels
    native.set_isa(isa)
    kernels.set_threads(threads)


@pytest.fixture(params=ISAS)
def kernels(best: Kernels, native: ModuleType, request: pytest.FixtureRequest) -> Kernels:
    """The kernels once for each instruction set this machine can run."""
    try:
        native.set_isa(request.param)
    except ValueError:
        pytest.skip(f"this processor cannot run {request.param}")
    return best

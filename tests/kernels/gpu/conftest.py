"""Every case runs with both implementations: on the device where there is one, in torch on the CPU, and in
Triton's interpreter, which has a process of its own (test_gpu_interpreted.py)."""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from kakeya.kernels.gpu import GpuKernels, load_gpu_kernels
from kakeya.types import KernelChoice
from support.gpu_bench import Bench
from support.interpreting import interpreting

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")


def _place(kernels: str, device: torch.device, dtype: torch.dtype) -> object:
    name = f"{kernels}-{device.type}-{str(dtype).removeprefix('torch.')}"
    return pytest.param((kernels, device, dtype), id=name, marks=pytest.mark.gpu if device == _CUDA else ())


if os.environ.get("TRITON_INTERPRET") == "1":
    PLACES = [_place("triton", _CPU, torch.float32)]  # it gets bfloat16 products wrong
else:
    PLACES = [
        _place("torch", _CPU, torch.float32),
        _place("torch", _CPU, torch.bfloat16),
        _place("torch", _CUDA, torch.float32),
        _place("triton", _CUDA, torch.float32),
        _place("triton", _CUDA, torch.bfloat16),
    ]


@pytest.fixture(params=PLACES)
def bench(request: pytest.FixtureRequest) -> Bench:
    kernels, device, dtype = request.param
    if device == _CUDA and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return Bench(_triton() if kernels == "triton" else _torch(device), device, dtype)


def _torch(device: torch.device) -> GpuKernels:
    return load_gpu_kernels(device, KernelChoice.TORCH)


def _triton() -> GpuKernels:
    pytest.importorskip("triton", reason="Triton is not installed here")
    from kakeya.kernels.gpu.triton_kernels import TritonKernels

    return TritonKernels()


_INTERPRETED = "test_triton_kernels_in_the_interpreter"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What waits for the interpreter comes last, when it has long been done."""
    items.sort(key=lambda item: item.name == _INTERPRETED)


@pytest.fixture(scope="session", autouse=True)
def interpreted(request: pytest.FixtureRequest) -> Iterator["subprocess.Popen[str] | None"]:
    """The process that runs this folder's cases in the interpreter, while others take their turns here."""
    wanted = any(item.name == _INTERPRETED for item in request.session.items)
    # Not imported to find out: that must wait for the process below.
    if not wanted or "TRITON_INTERPRET" in os.environ or find_spec("triton") is None:
        yield None
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent)]
    with subprocess.Popen(
        ["nice", *command], env=interpreting(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        yield process
        process.kill()

"""Every case runs with both implementations: on the device where there is one, in torch on the CPU, and in
Triton's interpreter, which has a process of its own (test_interpreted.py)."""

import os

import pytest
import torch

from kakeya.kernels.gpu import GpuKernels, load_gpu_kernels
from kakeya.types import KernelChoice
from support.gpu_kernels import Bench, hurry_interpreter

_CPU, _CUDA = torch.device("cpu"), torch.device("cuda")


def _place(kernels: str, device: torch.device, dtype: torch.dtype) -> object:
    name = f"{kernels}-{device.type}-{str(dtype).removeprefix('torch.')}"
    return pytest.param((kernels, device, dtype), id=name, marks=pytest.mark.gpu if device == _CUDA else ())


if os.environ.get("TRITON_INTERPRET") == "1":
    hurry_interpreter()
    PLACES = [_place("triton", _CPU, torch.float32)]  # it gets bfloat16 matmuls wrong
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
    """The interpreter takes minutes, so it begins at once; others run beside it (`make test`)."""
    items.sort(key=lambda item: item.name != _INTERPRETED)

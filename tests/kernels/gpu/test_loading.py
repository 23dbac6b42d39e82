"""Which kernels a device gets."""

import sys

import pytest
import torch

from kakeya.errors import ConfigError
from kakeya.kernels.gpu import load_gpu_kernels
from kakeya.types import KernelChoice
from support.gpu_kernels import Bench

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PROGRAMS = "kakeya.kernels.gpu.triton_kernels"


@pytest.mark.parametrize("choice", [KernelChoice.AUTO, KernelChoice.TORCH])
def test_a_cpu_gets_torch(choice: KernelChoice) -> None:
    assert load_gpu_kernels(CPU, choice).name == "torch"


@pytest.mark.parametrize(("capability", "pdl"), [((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_a_device_gets_triton_where_it_is(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], pdl: bool
) -> None:
    pytest.importorskip("triton", reason="Triton is not installed here")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for choice in (KernelChoice.AUTO, KernelChoice.NATIVE):
        kernels = load_gpu_kernels(CUDA, choice)
        assert (kernels.name, kernels.pdl) == ("triton", pdl)
    assert load_gpu_kernels(CUDA, KernelChoice.TORCH).name == "torch"


def test_a_device_without_triton_gets_torch_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PROGRAMS, None)  # importing it fails
    assert load_gpu_kernels(CUDA, KernelChoice.AUTO).name == "torch"
    with pytest.raises(ConfigError, match=r"Triton kernels are not available .* kernels=torch"):
        load_gpu_kernels(CUDA, KernelChoice.NATIVE)


def test_triton_cannot_be_asked_for_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="need a CUDA device, not cpu"):
        load_gpu_kernels(CPU, KernelChoice.NATIVE)


def test_heads_that_attention_takes(bench: Bench) -> None:
    taken = [d for d in (8, 16, 48, 64, 80, 96, 128, 256, 512) if bench.kernels.supports_head_dim(d)]
    expected = {"triton": [16, 64, 128, 256], "torch": [8, 16, 48, 64, 80, 96, 128, 256, 512]}
    assert taken == expected[bench.kernels.name]

"""Which kernels a device gets."""

from importlib import import_module

import torch

from kakeya.errors import ConfigError
from kakeya.kernels.gpu.interface import GpuKernels
from kakeya.kernels.gpu.torch_kernels import TorchKernels
from kakeya.types import KernelChoice

_HOPPER = (9, 0)  # the first compute capability with programmatic dependent launch


def load_gpu_kernels(device: torch.device, choice: KernelChoice) -> GpuKernels:
    """Triton's kernels or torch's.

    AUTO takes Triton where the device is a CUDA one and Triton can be imported. NATIVE insists on it and
    raises ConfigError with the reason.
    """
    if choice is KernelChoice.TORCH or (choice is KernelChoice.AUTO and device.type != "cuda"):
        return TorchKernels()
    if device.type != "cuda":
        raise ConfigError(f"the Triton kernels need a CUDA device, not {device}; choose kernels=torch")
    try:
        module = import_module("kakeya.kernels.gpu.triton_kernels")
    except ImportError as error:
        if choice is KernelChoice.AUTO:
            return TorchKernels()
        raise ConfigError(
            f"the Triton kernels are not available ({error}); install triton, or choose kernels=torch"
        ) from error
    kernels: GpuKernels = module.TritonKernels(pdl=torch.cuda.get_device_capability(device) >= _HOPPER)
    return kernels

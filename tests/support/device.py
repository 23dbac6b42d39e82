"""The CUDA backend on a CPU: its own code with the torch kernels, without graphs."""

from pathlib import Path

import torch

from kakeya.config import EngineConfig
from kakeya.engine.cuda.backend import CudaBackend
from kakeya.engine.cuda.weights import load_weights
from kakeya.engine.slab import SlabPool, slab_geometry
from kakeya.kernels.gpu import load_gpu_kernels
from kakeya.models.checkpoint import open_checkpoint

CPU = torch.device("cpu")


def make_device_backend(
    directory: Path, config: EngineConfig, device: torch.device = CPU, fingerprint: str = "tiny"
) -> CudaBackend:
    """A backend over the checkpoint in `directory`."""
    checkpoint = open_checkpoint(directory)
    weights = load_weights(checkpoint, dtype=config.dtype, weights=config.weights, device=device)
    pool = SlabPool(slab_geometry(checkpoint.config, config), config.capacity, device)
    kernels = load_gpu_kernels(device, config.kernels)
    backend = CudaBackend(weights, pool, config.numerics, kernels, fingerprint, config, device)
    backend.capture()
    return backend

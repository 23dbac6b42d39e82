"""Whether a model of the catalogue fits this machine's memory: arithmetic, before anything is fetched."""

import os
from dataclasses import dataclass
from pathlib import Path

from kakeya.config import EngineConfig
from kakeya.errors import ConfigError
from kakeya.types import BackendChoice, DType, WeightFormat

# An empty process of ours: Python, torch, the tokenizer, buffers of a step. About 310 MB on Linux.
PROCESS_BYTES = 350_000_000
# How much larger packed weights are than the file: scales in whole bytes, some rows of the embedding.
PACKED_OVER_FILE = 1.1
# The same for MLX, whose groups have scales of 32 bits. What is held as floats takes more: see its backend.
MLX_OVER_FILE = 1.35
# For weights in another format than the file's; integers have two 16-bit numbers for each group of 32.
BYTES_PER_PARAMETER = {
    WeightFormat.FLOAT32: 4.0,
    WeightFormat.BF16: 2.0,
    WeightFormat.INT8: 1.125,
    WeightFormat.INT4: 0.625,
}
_CACHE_BYTES = {DType.FLOAT32: 4, DType.BFLOAT16: 2}


@dataclass(frozen=True)
class Geometry:
    """The shape of a model, as far as its memory and speed depend on it.

    `parameters` are those in the file: where `tied_head` is false it holds a table for the head too.
    """

    layers: int
    kv_heads: int
    head_dim: int
    hidden: int
    vocabulary: int
    parameters: int
    tied_head: bool

    @property
    def embedding(self) -> int:
        """Elements of the embedding table."""
        return self.vocabulary * self.hidden

    @property
    def token_parameters(self) -> int:
        """Parameters that decoding a token reads: only one row of an embedding that is not also the head."""
        return self.parameters - (0 if self.tied_head else self.embedding)

    @property
    def prompt_parameters(self) -> int:
        """Parameters that each prompt token is multiplied with: only the last one needs the head."""
        return self.token_parameters - self.embedding


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes by purpose for one session. As text it is the sum."""

    weights: int
    slab: int
    process: int = PROCESS_BYTES

    @property
    def total(self) -> int:
        return self.weights + self.slab + self.process

    def __str__(self) -> str:
        return (
            f"weights {self.weights:,} + a session's slab {self.slab:,} + the process {self.process:,} "
            f"= {self.total:,} bytes"
        )


def memory_need(geometry: Geometry, file_bytes: int, config: EngineConfig) -> MemoryNeed:
    """What the model takes in main memory with one session at the configured window."""
    per_parameter = BYTES_PER_PARAMETER.get(config.weights)
    over_file = MLX_OVER_FILE if config.backend is BackendChoice.MLX else PACKED_OVER_FILE
    held = file_bytes * over_file if per_parameter is None else geometry.parameters * per_parameter
    per_token = geometry.layers * 2 * geometry.kv_heads * geometry.head_dim * _CACHE_BYTES[config.dtype]
    return MemoryNeed(weights=int(held), slab=per_token * config.cache.slots)


def check_fits(name: str, need: MemoryNeed, config: EngineConfig) -> None:
    """Raises ConfigError with the arithmetic when the CPU is to compute and its memory is too small."""
    free = available_memory()
    if need.total > free and not _is_for_a_device(config):
        raise ConfigError(
            f"{name} does not fit in memory: {need}, and {free:,} bytes are free; "
            "`kakeya models --fits` shows what fits"
        )


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that can be had without swapping: what Linux says, elsewhere the physical memory."""
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _is_for_a_device(config: EngineConfig) -> bool:
    """Whether a device will hold weights and slabs. Its memory is checked when it is opened."""
    if config.backend is BackendChoice.AUTO:
        import torch  # here, because a model that fits does not need it

        return torch.cuda.is_available()
    return config.backend is BackendChoice.CUDA

"""Estimates how fast this machine runs a model, from one measured matmul of the native kernels."""

import os
import statistics
import time
from dataclasses import dataclass

import torch

from kakeya.kernels import Kernels, PackedMatrix, load
from kakeya.models.fitting import Geometry
from kakeya.models.quantized import GROUP
from kakeya.types import KernelChoice

COLUMNS = 8_192
# One row reads 126 MB of packed weights, more than the caches of the machines people have. The rows of a
# prompt keep the arithmetic busy whatever the weights come from.
ROW_OUTPUTS, PROMPT_OUTPUTS = 24_576, 4_096
PROMPT_ROWS = 128
SECONDS = 0.25


@dataclass(frozen=True)
class MeasuredMatmul:
    """The speed of a matmul by 4-bit weights on all threads: with one row, and with the rows of a prompt."""

    weight_bytes_per_s: float
    multiply_adds_per_s: float
    threads: int
    isa: str

    def decode_tokens_per_s(self, geometry: Geometry, file_bytes: int) -> float:
        """Tokens of one session with a short history: each reads the weights once."""
        read = file_bytes * geometry.token_parameters / geometry.parameters
        return self.weight_bytes_per_s / read

    def prompt_tokens_per_s(self, geometry: Geometry) -> float:
        """Tokens of a short prompt: each is multiplied with every weight."""
        return self.multiply_adds_per_s / geometry.prompt_parameters


def measure(row_outputs: int = ROW_OUTPUTS, prompt_outputs: int = PROMPT_OUTPUTS) -> MeasuredMatmul | None:
    """Time the matmul on all threads, for about a second in all. None without native kernels."""
    kernels = load(KernelChoice.AUTO)
    if kernels is None:
        return None
    kernels.set_threads(os.cpu_count() or 1)
    read, multiplied = _weights(kernels, row_outputs), _weights(kernels, prompt_outputs)
    return MeasuredMatmul(
        weight_bytes_per_s=read.nbytes / _usual_time(kernels, 1, read),
        multiply_adds_per_s=PROMPT_ROWS
        * prompt_outputs
        * COLUMNS
        / _usual_time(kernels, PROMPT_ROWS, multiplied),
        threads=kernels.threads,
        isa=kernels.isa,
    )


def _weights(kernels: Kernels, outputs: int) -> PackedMatrix:
    groups = (outputs, COLUMNS // GROUP)
    scale, minimum = torch.ones(groups, dtype=torch.float16), torch.zeros(groups, dtype=torch.float16)
    part = kernels.pack(4, torch.zeros((outputs, COLUMNS), dtype=torch.uint8), scale, minimum)
    return kernels.matrix([part], COLUMNS)


def _usual_time(kernels: Kernels, rows: int, weights: PackedMatrix) -> float:
    """The median seconds of one matmul. Other programs that run now slow it down, as they would a model."""
    x = torch.ones(rows, COLUMNS)
    kernels.linear(x, weights)  # the first one is slower: its pages are not mapped yet
    times: list[float] = []
    ends = time.perf_counter() + SECONDS
    while not times or time.perf_counter() < ends:
        began = time.perf_counter()
        kernels.linear(x, weights)
        times.append(time.perf_counter() - began)
    return statistics.median(times)

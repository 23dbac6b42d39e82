"""The device's random numbers, one program each. Importing this imports Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kakeya.kernels.gpu.device.draw import uniform as _uniform


@triton.jit
def _uniforms(seed_ptr, position_ptr, out_ptr):  # noqa: ANN001, ANN202
    at = tl.program_id(0)
    tl.store(out_ptr + at, _uniform(tl.load(seed_ptr + at), tl.load(position_ptr + at)))


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    out = torch.empty(seeds.shape, dtype=torch.float64, device=seeds.device)
    _uniforms[(len(seeds),)](seeds, positions, out)
    return out

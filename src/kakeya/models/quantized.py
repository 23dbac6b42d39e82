"""Integer weights with a scale and a minimum for every group of 32 columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kakeya.errors import UnsupportedModel
from kakeya.models.blocks import BlockFormat, BlockTensor, float16_at, row_slices, unpack

GROUP = 32
Bits = Literal[4, 8]
# The block formats that a QuantizedTensor holds without changing a number.
INTEGER_BITS: dict[BlockFormat, Bits] = {BlockFormat.Q4_0: 4, BlockFormat.Q4_1: 4, BlockFormat.Q8_0: 8}
# Rows are expanded a slice at a time, so that the float32 temporaries stay in the cache.
_SLICE_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class QuantizedTensor:
    """A matrix w = q * scale + minimum, `scale` and `minimum` shared by 32 neighbouring columns."""

    bits: Bits
    q: Tensor  # uint8 [N, K], values below 2**bits
    scale: Tensor  # float16 [N, K / 32]
    minimum: Tensor  # float16 [N, K / 32]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.q.shape
        return rows, columns

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The matrix in `dtype`: computed in float32, rounded once."""
        rows, columns = self.shape
        out = torch.empty(rows, columns, dtype=dtype)
        for part in row_slices(self.shape, _SLICE_ELEMENTS):
            groups = self.q[part].view(-1, columns // GROUP, GROUP).float()
            groups.mul_(self.scale[part].float().unsqueeze(-1)).add_(self.minimum[part].float().unsqueeze(-1))
            out[part] = groups.view(-1, columns)
        return out

    def widened(self, bits: Bits) -> "QuantizedTensor":
        """The same numbers, filed under a wider format."""
        assert bits >= self.bits
        return QuantizedTensor(bits, self.q, self.scale, self.minimum)


def quantize(tensor: Tensor, bits: Bits) -> QuantizedTensor:
    """`tensor` [N, K] with every group of 32 columns spread evenly over 2**bits levels; K % 32 must be 0."""
    rows, columns = tensor.shape
    assert columns % GROUP == 0
    q = torch.empty(rows, columns, dtype=torch.uint8)
    scale = torch.empty(rows, columns // GROUP, dtype=torch.float16)
    minimum = torch.empty_like(scale)
    for part in row_slices((rows, columns), _SLICE_ELEMENTS):
        groups = tensor[part].float().view(-1, columns // GROUP, GROUP)
        low, high = groups.aminmax(dim=-1)
        minimum[part] = low
        scale[part] = (high - low) / (2**bits - 1)
        # Levels are counted from the rounded minimum in rounded steps: those are the ones that will be used.
        rounded = scale[part].float().unsqueeze(-1)
        steps = (groups - minimum[part].float().unsqueeze(-1)) / rounded.masked_fill(rounded == 0, 1.0)
        q[part] = steps.round_().clamp_(0, 2**bits - 1).view(-1, columns).to(torch.uint8)
    return QuantizedTensor(bits, q, scale, minimum)


def integers_of(tensor: BlockTensor) -> QuantizedTensor:
    """The same numbers; the format must be one of INTEGER_BITS. Raises UnsupportedModel for huge scales."""
    bits, blocks = INTEGER_BITS[tensor.format], tensor.raw.view(-1, tensor.format.nbytes)
    groups = (tensor.shape[0], -1)
    levels = unpack(tensor.format, blocks).levels.view(torch.uint8).view(tensor.shape)
    scale = float16_at(blocks, 0).half().view(groups)
    if tensor.format.minimum_at is not None:
        return QuantizedTensor(bits, levels, scale, float16_at(blocks, 2).half().view(groups))
    half = 2 ** (bits - 1)  # w = signed * scale, and a level is that much more than the signed number
    return QuantizedTensor(bits, levels + half, scale, _lowest(scale, half))


def _lowest(scale: Tensor, levels: int) -> Tensor:
    lowest = scale * -levels
    if not torch.isfinite(lowest.float().sum()):  # one sum finds a stray infinity
        raise UnsupportedModel(
            f"a scale of {float(scale.abs().max()):g} times {levels} is no float16; use bf16 weights"
        )
    return lowest


def concatenate(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Matrices with the same columns stacked into one, in the widest format among them."""
    return QuantizedTensor(
        max(part.bits for part in parts),
        torch.cat([part.q for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat([part.minimum for part in parts]),
    )

"""Integer weights with a scale and a minimum for every group of 32 columns."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kakeya.errors import UnsupportedModel
from kakeya.models.blocks import BlockFormat, BlockTensor, row_slices

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
    rows, columns = tensor.shape
    blocks = tensor.raw.view(rows, columns // GROUP, tensor.format.nbytes)  # [rows, groups, bytes]
    scale = _halves(blocks, 0)
    if tensor.format is BlockFormat.Q4_1:
        return QuantizedTensor(4, _nibbles(blocks[..., 4:]), scale, _halves(blocks, 2))
    if tensor.format is BlockFormat.Q4_0:  # w = (q - 8) * scale
        return QuantizedTensor(4, _nibbles(blocks[..., 2:]), scale, _lowest(scale, 8))
    assert tensor.format is BlockFormat.Q8_0  # w = signed * scale; flipping the top bit adds 128
    q = blocks[..., 2:].bitwise_xor(0x80).view(rows, columns)
    return QuantizedTensor(8, q, scale, _lowest(scale, 128))


def _lowest(scale: Tensor, levels: int) -> Tensor:
    lowest = scale * -levels
    if not torch.isfinite(lowest.float().sum()):  # one sum finds a stray infinity
        raise UnsupportedModel(
            f"a scale of {float(scale.abs().max()):g} times {levels} is no float16; use bf16 weights"
        )
    return lowest


def _halves(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at `offset` of every block, [rows, groups]."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves are columns 0-15 of a group, high halves columns 16-31; [rows, groups, 16] -> [rows, K]."""
    rows, groups, half = packed.shape
    q = torch.empty(rows, groups, GROUP, dtype=torch.uint8)
    torch.bitwise_and(packed, 0x0F, out=q[..., :half])
    torch.bitwise_right_shift(packed, 4, out=q[..., half:])
    return q.view(rows, groups * GROUP)


def concatenate(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Matrices with the same columns stacked into one, in the widest format among them."""
    return QuantizedTensor(
        max(part.bits for part in parts),
        torch.cat([part.q for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat([part.minimum for part in parts]),
    )

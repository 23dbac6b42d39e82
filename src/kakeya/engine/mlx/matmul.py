"""Matrices as MLX multiplies by them: dense, or integers in groups of 32 columns.

Both take float32 rows and return float32 rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kakeya.engine.mlx.arrays import to_mlx
from kakeya.models.blocks import DEVICE_SLICE_ELEMENTS, BlockFormat, BlockTensor, affine, row_slices
from kakeya.models.quantized import GROUP, QuantizedTensor

# The formats whose groups are MLX's: the bits that hold their levels, and the lowest level.
GROUPS_OF_32: dict[BlockFormat, tuple[int, int]] = {
    BlockFormat.Q4_0: (4, -8),
    BlockFormat.Q4_1: (4, 0),
    BlockFormat.Q4_K: (4, 0),
    BlockFormat.Q5_0: (5, -16),
    BlockFormat.Q5_1: (5, 0),
    BlockFormat.Q5_K: (5, 0),
    BlockFormat.MXFP4: (5, -12),
    BlockFormat.Q8_0: (8, -128),
    BlockFormat.IQ4_NL: (8, -127),
    BlockFormat.IQ4_XS: (8, -127),
}


class Matrix(Protocol):
    """A weight [N, K]."""

    def multiply(self, x: mx.array) -> mx.array:
        """x [..., K] @ weight.T."""

    def rows(self, indices: mx.array) -> mx.array:
        """Those rows of the weight."""


@dataclass(frozen=True)
class DenseMatrix:
    """Floats of one type, which x is rounded to."""

    weight: mx.array

    def multiply(self, x: mx.array) -> mx.array:
        return (x.astype(self.weight.dtype) @ self.weight.T).astype(mx.float32)

    def rows(self, indices: mx.array) -> mx.array:
        return self.weight[indices].astype(mx.float32)


@dataclass(frozen=True)
class AffineMatrix:
    """weight = level * scale + minimum, with levels of `bits` packed into uint32.

    Scales and minimums are float32. MLX computes in their type, and in float32 all of the file's numbers are
    what they were: float16 would do for some formats, but not for what activations come to in some models.
    """

    packed: mx.array  # uint32 [N, K * bits / 32]
    scale: mx.array  # float32 [N, K / 32]
    minimum: mx.array  # float32 [N, K / 32]
    bits: int

    def multiply(self, x: mx.array) -> mx.array:
        return mx.quantized_matmul(
            x, self.packed, self.scale, self.minimum, transpose=True, group_size=GROUP, bits=self.bits
        )

    def rows(self, indices: mx.array) -> mx.array:
        return mx.dequantize(
            self.packed[indices],
            self.scale[indices],
            self.minimum[indices],
            group_size=GROUP,
            bits=self.bits,
        )


@dataclass(frozen=True)
class StackedMatrix:
    """Parts that no single call takes together."""

    parts: Sequence[Matrix]

    def multiply(self, x: mx.array) -> mx.array:
        return mx.concatenate([part.multiply(x) for part in self.parts], axis=-1)

    def rows(self, indices: mx.array) -> mx.array:
        raise AssertionError("only a table of embeddings is read by rows, and it has one part")


@dataclass(frozen=True)
class Linear:
    """x @ weight.T + bias."""

    matrix: Matrix
    bias: mx.array | None = None

    def __call__(self, x: mx.array) -> mx.array:
        result = self.matrix.multiply(x)
        return result if self.bias is None else result + self.bias


def stacked(parts: Sequence[Matrix]) -> Matrix:
    """One matrix of the parts' rows, in one call where they are alike."""
    first = parts[0]
    if len(parts) == 1:
        return first
    dense = [part.weight for part in parts if isinstance(part, DenseMatrix)]
    if len(dense) == len(parts):
        return DenseMatrix(mx.concatenate(dense))
    alike = [part for part in parts if isinstance(part, AffineMatrix) and part.bits == _bits(first)]
    if len(alike) < len(parts):
        return StackedMatrix(tuple(parts))
    return AffineMatrix(
        mx.concatenate([part.packed for part in alike]),
        mx.concatenate([part.scale for part in alike]),
        mx.concatenate([part.minimum for part in alike]),
        alike[0].bits,
    )


def _bits(matrix: Matrix) -> int | None:
    return matrix.bits if isinstance(matrix, AffineMatrix) else None


def affine_of_blocks(blocks: BlockTensor) -> AffineMatrix:
    """The file's own numbers, of a format among GROUPS_OF_32."""
    bits, lowest = GROUPS_OF_32[blocks.format]
    packed, scales, minimums = [], [], []
    for part in row_slices(blocks.shape, DEVICE_SLICE_ELEMENTS):
        rows = blocks.raw[part]
        levels, scale, minimum = affine(blocks.format, rows.view(-1, blocks.format.nbytes))
        shape = (rows.shape[0], -1)
        packed.append(_pack((levels.short() - lowest).view(shape), bits))
        scales.append(scale.reshape(shape))
        minimums.append((scale * lowest if minimum is None else minimum).reshape(shape))
    joined = mx.array(np.concatenate(packed))
    return AffineMatrix(joined, to_mlx(torch.cat(scales)), to_mlx(torch.cat(minimums)), bits)


def affine_of_integers(weight: QuantizedTensor) -> AffineMatrix:
    """The same numbers."""
    scale, minimum = (to_mlx(part.float()) for part in (weight.scale, weight.minimum))
    return AffineMatrix(mx.array(_pack(weight.q, weight.bits)), scale, minimum, weight.bits)


def _pack(levels: Tensor, bits: int) -> npt.NDArray[np.uint32]:
    """Levels [N, K] as one run of bits a row, the lowest first."""
    eight = levels.numpy().astype(np.uint64).reshape(levels.shape[0], -1, 8)
    words = np.bitwise_or.reduce(eight << (np.arange(8, dtype=np.uint64) * np.uint64(bits)), axis=-1)
    used = words.view(np.uint8).reshape(*words.shape, 8)[..., :bits]
    return np.ascontiguousarray(used.reshape(levels.shape[0], -1)).view(np.uint32)

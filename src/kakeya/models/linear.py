"""Matmuls by a weight [N, K]: native packed, torch dense, torch 4-bit, and torch in fixed tiles.

All take float32 rows x [M, K] and return new float32 rows [M, N], with bias and residual added in float32.
In fast numerics the choice of kernel depends on M alone; in exact numerics a row's bits do not depend on M.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kakeya.kernels import Kernels, PackedPart
from kakeya.models.float_types import FLOAT_NAMES
from kakeya.models.quantized import GROUP, QuantizedTensor

# The row count of every exact matmul. Measured: a compromise between padding one row and cutting many.
EXACT_TILE = 16
# Up to here torch's 4-bit kernel beats a bf16 matmul of the same matrices (2 cores, AVX-512).
FEW_ROWS = 16
# torch packs 4-bit weights in blocks of this many rows of the matrix.
_INT4_ROW_BLOCK = 16


class Linear(Protocol):
    """x @ weight.T + bias + residual."""

    @property
    def formats(self) -> tuple[str, ...]:
        """How the weight is held, for people: the different formats of its parts."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor: ...


def quantized_linear(
    weight: QuantizedTensor, bias: Tensor | None, *, dtype: torch.dtype, exact: bool, kernels: Kernels | None
) -> Linear:
    """The fastest matmul for an integer weight; torch has one for bf16 by 4 bits only."""
    name = f"int{weight.bits}"
    if kernels is not None:
        part = kernels.pack(weight.bits, weight.q, weight.scale, weight.minimum)
        return PackedLinear(kernels, [part], weight.shape[1], bias, (name,))
    if weight.bits == 4 and dtype == torch.bfloat16 and not exact and weight.shape[0] % _INT4_ROW_BLOCK == 0:
        return FewRowsInt4Linear(weight, bias, f"{name}, bf16 for many rows")
    return dense_linear(weight.dequantize(dtype), bias, exact=exact, origin=name)


def dense_linear(weight: Tensor, bias: Tensor | None, *, exact: bool, origin: str) -> Linear:
    """A matmul in the weight's own dtype. `origin`: the format its numbers were rounded to."""
    held = FLOAT_NAMES[weight.dtype]
    name = held if origin == held else f"{origin} held as {held}"
    return TiledLinear(weight, bias, name) if exact else DenseLinear(weight, bias, name)


class PackedLinear:
    """Integer weights in the kernel library's own order: one part, or several of different formats."""

    def __init__(
        self,
        kernels: Kernels,
        parts: Sequence[PackedPart],
        columns: int,
        bias: Tensor | None,
        formats: tuple[str, ...],
    ) -> None:
        self.formats = formats
        self.matrix = kernels.matrix(parts, columns)
        self.bias = bias
        self._kernels = kernels
        self._linear = kernels.linear

    def __call__(self, x: Tensor, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        return self._linear(x, self.matrix, self.bias, residual, out)

    def first_outputs(self, count: int) -> "PackedLinear":
        """The same for its first outputs alone, a multiple of 16 of its first part, in the same memory."""
        columns, bias = self.matrix.columns, None if self.bias is None else self.bias[:count]
        part = self._kernels.first_rows(self.matrix.parts[0], columns, count)
        return PackedLinear(self._kernels, [part], columns, bias, self.formats[:1])


class StackedLinear:
    """One matmul for each part of a matrix, where no kernel takes all parts together."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        self.formats = tuple(dict.fromkeys(name for part in parts for name in part.formats))
        self._parts = parts

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        result = torch.cat([part(x) for part in self._parts], dim=1)
        return result if residual is None else result.add_(residual)


class DenseLinear:
    """One torch matmul in the weight's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None, name: str) -> None:
        self.formats = (name,)
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return _finished(functional.linear(x.to(self._weight.dtype), self._weight), self._bias, residual)


class TiledLinear:
    """Matmuls of EXACT_TILE rows each, the last padded with zeros: one shape, one order of additions."""

    def __init__(self, weight: Tensor, bias: Tensor | None, name: str) -> None:
        self.formats = (name,)
        self._transposed = weight.t()  # [K, N], a view
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        padding = -rows % EXACT_TILE
        padded = functional.pad(x.to(self._transposed.dtype), (0, 0, 0, padding))
        out = padded.new_empty(rows + padding, self._transposed.shape[1])
        for tile, result in zip(torch.split(padded, EXACT_TILE), torch.split(out, EXACT_TILE), strict=True):
            torch.mm(tile, self._transposed, out=result)
        return _finished(out[:rows], self._bias, residual)


class FewRowsInt4Linear:
    """torch's 4-bit matmul for few rows, and a bf16 copy of the same matrix for many."""

    def __init__(self, weight: QuantizedTensor, bias: Tensor | None, name: str) -> None:
        self.formats = (name,)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.q.to(torch.int32), 1)
        # The kernel reads w = (q - 8) * scale + zero, with [K / 32, N, 2] of scale and zero.
        scale, minimum = weight.scale.float(), weight.minimum.float()
        pairs = torch.stack([scale, minimum + 8 * scale], dim=-1)
        self._scale_and_zero = pairs.transpose(0, 1).to(torch.bfloat16).contiguous()
        self._dense = DenseLinear(weight.dequantize(torch.bfloat16), bias, name)
        self._bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if x.shape[0] > FEW_ROWS:
            return self._dense(x, residual)
        result = torch.ops.aten._weight_int4pack_mm_for_cpu(
            x.to(torch.bfloat16), self._packed, GROUP, self._scale_and_zero
        )
        return _finished(result, self._bias, residual)


def _finished(raw: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
    """The result of a matmul as float32, with bias and residual added. `raw` is used up."""
    result = raw.float()
    if bias is not None:
        result.add_(bias)
    return result if residual is None else result.add_(residual)

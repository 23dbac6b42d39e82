"""Matmuls over the leading rows of buffers: cuBLAS, or our Triton kernels where those are faster.

With few rows a matmul is split along K, and the norm that follows adds up the partial sums. In exact numerics
every matmul has the same number of rows, whatever a step needs: one shape has one order of additions, so a
row's bits do not depend on other rows. The rows beyond a step's own hold old numbers, which only cost time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kakeya.engine.cuda.weights import Matrix
from kakeya.engine.cuda.workspace import EXACT_TILE, Workspace
from kakeya.kernels.gpu import MAX_K_SPLITS, MAX_MATMUL_ROWS, Activation, GpuKernels
from kakeya.models.row_ops import softcap

# Up to this many outputs, over all rows, cuBLAS is fastest with MAX_K_SPLITS splits, beyond with 2.
_FEW_OUTPUTS = 64 * 4096
_ALIGNED = 64  # the columns of a split are a multiple of it


class Matmuls:
    """x @ weight.T + bias of the first `rows` rows of a buffer into those of another."""

    def __init__(self, kernels: GpuKernels, space: Workspace, exact: bool) -> None:
        self._kernels, self._space, self._exact = kernels, space, exact

    def __call__(self, x: Tensor, matrix: Matrix, out: Tensor, rows: int) -> None:
        if self._kernel_splits(matrix, matrix.outputs, rows, most=1):
            self._kernels.matmul(x[:rows], matrix.weight, out[:rows])
        else:
            self._with_library(x, matrix, out, rows)

    def gated(self, x: Tensor, matrix: Matrix, activation: Activation, out: Tensor, rows: int) -> None:
        """activation(first half) * second half of the result."""
        if self._kernel_splits(matrix, matrix.outputs // 2, rows, most=1):
            self._kernels.matmul(x[:rows], matrix.weight, out[:rows], gate=activation)
        else:
            self._with_library(x, matrix, self._space.gate_up, rows)
            self._kernels.gated(self._space.gate_up[:rows], activation, out[:rows])

    def project(self, x: Tensor, matrix: Matrix, rows: int) -> Tensor:
        """The result as `add_norm` takes it: whole, or the partial sums of a split-K matmul. Valid until the
        next call."""
        if splits := self._kernel_splits(matrix, matrix.outputs, rows, most=MAX_K_SPLITS):
            out = self._space.partial_sums(splits, rows, torch.float32)
            self._kernels.matmul(x[:rows], matrix.weight, out)
        elif splits := self._library_splits(matrix, rows):
            out = self._space.partial_sums(splits, rows, x.dtype)
            torch.bmm(_split_k(x[:rows], splits), _split_k(matrix.weight, splits).mT, out=out)
        else:
            out = self._space.projected[:rows]
            self._with_library(x, matrix, self._space.projected, rows)
        return out

    def _kernel_splits(self, matrix: Matrix, outputs: int, rows: int, most: int) -> int:
        if self._exact or matrix.bias is not None:
            return 0
        return self._kernels.k_splits(rows, matrix.weight, outputs, most)

    def _library_splits(self, matrix: Matrix, rows: int) -> int:
        """How many splits cuBLAS gets: with few rows its tiles do not fill a device. 0 for no split."""
        if self._exact or matrix.bias is not None or rows > MAX_MATMUL_ROWS:
            return 0
        splits = MAX_K_SPLITS if rows * matrix.outputs <= _FEW_OUTPUTS else 2
        return splits if matrix.weight.shape[1] % (splits * _ALIGNED) == 0 else 0

    def _with_library(self, x: Tensor, matrix: Matrix, out: Tensor, rows: int) -> None:
        transposed = matrix.weight.t()
        for tile in self._row_tiles(rows):
            if matrix.bias is None:
                torch.mm(x[tile], transposed, out=out[tile])
            else:
                torch.addmm(matrix.bias, x[tile], transposed, out=out[tile])

    def logits(self, x: Tensor, head: Matrix, out: Tensor, rows: int, cap: float | None) -> Tensor:
        """Logits in float32 for any element type, soft-capped: the leading rows of `out`."""
        transposed = head.weight.t()
        for tile in self._row_tiles(rows):
            _float32_matmul(x[tile], transposed, out[tile])
        logits = out[:rows]
        if cap is not None:
            _cap(logits, cap)
        return logits

    def _row_tiles(self, rows: int) -> Iterator[slice]:
        if not self._exact:
            yield slice(0, rows)
            return
        for first in range(0, rows, EXACT_TILE):
            yield slice(first, first + EXACT_TILE)


def _split_k(x: Tensor, splits: int) -> Tensor:
    """A view of the columns in equal splits: [splits, rows, columns / splits]."""
    rows, columns = x.shape
    return x.view(rows, splits, columns // splits).transpose(0, 1)


def _float32_matmul(x: Tensor, transposed: Tensor, out: Tensor) -> None:
    if x.dtype == torch.float32:
        torch.mm(x, transposed, out=out)
    elif x.is_cuda:
        torch.mm(x, transposed, out_dtype=torch.float32, out=out)
    else:
        out.copy_(torch.mm(x, transposed))


def _cap(logits: Tensor, cap: float) -> None:
    if logits.is_cuda:
        logits.div_(cap).tanh_().mul_(cap)
    else:
        softcap(logits, cap)  # a row at a time: the tails of a CPU's vector loops round differently

"""Matrix products over the leading rows of buffers: a library's, or the kernels' own where those are quicker.

In exact numerics every product has the same number of rows, whatever a step needs: one shape, one order of
additions, so a row's bits are its own. The rows beyond a step's own hold old numbers, which only cost time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kakeya.engine.cuda.weights import Matrix
from kakeya.engine.cuda.workspace import EXACT_TILE, Workspace
from kakeya.kernels.gpu import MAX_PARTS, MAX_PRODUCT_ROWS, Activation, GpuKernels
from kakeya.models.row_ops import softcap

# A library's product with so many outputs over all its rows is quickest in MAX_PARTS, with more in two.
_FEW_OUTPUTS = 64 * 4096
_ALIGNED = 64  # a part's columns are a multiple of it


class Products:
    """x @ weight.T + bias of the first `rows` rows of a buffer into those of another."""

    def __init__(self, kernels: GpuKernels, space: Workspace, exact: bool) -> None:
        self._kernels, self._space, self._exact = kernels, space, exact

    def __call__(self, x: Tensor, matrix: Matrix, out: Tensor, rows: int) -> None:
        if self._own_parts(matrix, matrix.outputs, rows, most=1):
            self._kernels.product(x[:rows], matrix.weight, out[:rows])
        else:
            self._by_library(x, matrix, out, rows)

    def gated(self, x: Tensor, matrix: Matrix, activation: Activation, out: Tensor, rows: int) -> None:
        """activation(first half) * second half of the product."""
        if self._own_parts(matrix, matrix.outputs // 2, rows, most=1):
            self._kernels.product(x[:rows], matrix.weight, out[:rows], gate=activation)
        else:
            self._by_library(x, matrix, self._space.gate_up, rows)
            self._kernels.gated(self._space.gate_up[:rows], activation, out[:rows])

    def projected(self, x: Tensor, matrix: Matrix, rows: int) -> Tensor:
        """The product as `add_norm` takes it: whole or in parts, good until the next one."""
        if parts := self._own_parts(matrix, matrix.outputs, rows, most=MAX_PARTS):
            out = self._space.parts(parts, rows, torch.float32)
            self._kernels.product(x[:rows], matrix.weight, out)
        elif parts := self._library_parts(matrix, rows):
            out = self._space.parts(parts, rows, x.dtype)
            torch.bmm(_cut(x[:rows], parts), _cut(matrix.weight, parts).mT, out=out)
        else:
            out = self._space.projected[:rows]
            self._by_library(x, matrix, self._space.projected, rows)
        return out

    def _own_parts(self, matrix: Matrix, outputs: int, rows: int, most: int) -> int:
        if self._exact or matrix.bias is not None:
            return 0
        return self._kernels.product_parts(rows, matrix.weight, outputs, most)

    def _library_parts(self, matrix: Matrix, rows: int) -> int:
        """In how many parts a library's product is quicker: its tiles of few rows do not fill a device."""
        if self._exact or matrix.bias is not None or rows > MAX_PRODUCT_ROWS:
            return 0
        parts = MAX_PARTS if rows * matrix.outputs <= _FEW_OUTPUTS else 2
        return parts if matrix.weight.shape[1] % (parts * _ALIGNED) == 0 else 0

    def _by_library(self, x: Tensor, matrix: Matrix, out: Tensor, rows: int) -> None:
        transposed = matrix.weight.t()
        for part in self._pieces(rows):
            if matrix.bias is None:
                torch.mm(x[part], transposed, out=out[part])
            else:
                torch.addmm(matrix.bias, x[part], transposed, out=out[part])

    def logits(self, x: Tensor, head: Matrix, out: Tensor, rows: int, cap: float | None) -> Tensor:
        """The same in float32 whatever the element type, soft-capped: the leading rows of `out`."""
        transposed = head.weight.t()
        for part in self._pieces(rows):
            _float32_product(x[part], transposed, out[part])
        logits = out[:rows]
        if cap is not None:
            _cap(logits, cap)
        return logits

    def _pieces(self, rows: int) -> Iterator[slice]:
        if not self._exact:
            yield slice(0, rows)
            return
        for first in range(0, rows, EXACT_TILE):
            yield slice(first, first + EXACT_TILE)


def _cut(x: Tensor, parts: int) -> Tensor:
    """Columns shared out: [parts, rows, columns / parts]."""
    rows, columns = x.shape
    return x.view(rows, parts, columns // parts).transpose(0, 1)


def _float32_product(x: Tensor, transposed: Tensor, out: Tensor) -> None:
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
        softcap(logits, cap)  # a row at a time: a CPU's loops end in code that rounds otherwise

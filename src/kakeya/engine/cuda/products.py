"""Matrix products over the leading rows of buffers, by the device's own library.

In exact numerics every product has the same number of rows, whatever a step needs: one shape, one order of
additions, so a row's bits are its own. The rows beyond a step's own hold old numbers, which only cost time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from kakeya.engine.cuda.weights import Matrix
from kakeya.engine.cuda.workspace import EXACT_TILE
from kakeya.models.row_ops import softcap


class Products:
    """x @ weight.T + bias of the first `rows` rows of a buffer into those of another."""

    def __init__(self, exact: bool) -> None:
        self._exact = exact

    def __call__(self, x: Tensor, matrix: Matrix, out: Tensor, rows: int) -> None:
        transposed = matrix.weight.t()
        for part in self._parts(rows):
            if matrix.bias is None:
                torch.mm(x[part], transposed, out=out[part])
            else:
                torch.addmm(matrix.bias, x[part], transposed, out=out[part])

    def logits(self, x: Tensor, head: Matrix, out: Tensor, rows: int, cap: float | None) -> Tensor:
        """The same in float32 whatever the element type, soft-capped: the leading rows of `out`."""
        transposed = head.weight.t()
        for part in self._parts(rows):
            _float32_product(x[part], transposed, out[part])
        logits = out[:rows]
        if cap is not None:
            _cap(logits, cap)
        return logits

    def _parts(self, rows: int) -> Iterator[slice]:
        if not self._exact:
            yield slice(0, rows)
            return
        for first in range(0, rows, EXACT_TILE):
            yield slice(first, first + EXACT_TILE)


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

"""Matmuls of some hundred rows with a small weight, where cuBLAS spends its time on starting.

The programs are many and short. Split-K: each split takes a share of the columns of x and stores a partial
sum in float32. The kernel that reads the result adds the partial sums, always in the same order.
"""

import triton
import triton.language as tl

from kakeya.kernels.gpu.device.pdl import wait_for_predecessor
from kakeya.kernels.gpu.device.rowwise import UNGATED, activated


@triton.jit
def matmul(
    x_ptr, weight_ptr, out_ptr, rows, n,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, SPLITS: tl.constexpr,
    GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, block of columns, split). A gated weight has 2 n rows: gate first."""
    wait_for_predecessor(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.program_id(2) * (K // SPLITS) + tl.arange(0, DEPTH)
    # Rows and columns beyond the last one repeat it, and are not stored.
    x_at = x_ptr + tl.minimum(row, rows - 1)[:, None] * K + k[None, :]
    weight_at = weight_ptr + tl.minimum(column, n - 1)[:, None] * K + k[None, :]
    y = tl.zeros([ROWS, COLUMNS], tl.float32)
    up = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, K // SPLITS, DEPTH):
        x = tl.load(x_at + start)
        y = tl.dot(x, tl.load(weight_at + start).T, y, input_precision="ieee")
        if GATE != UNGATED:
            up = tl.dot(x, tl.load(weight_at + n * K + start).T, up, input_precision="ieee")
    if GATE != UNGATED:
        y = activated(y, GATE) * up
    stored = (row < rows)[:, None] & (column < n)[None, :]
    out_at = out_ptr + (tl.program_id(2) * rows + row)[:, None] * n + column[None, :]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=stored)

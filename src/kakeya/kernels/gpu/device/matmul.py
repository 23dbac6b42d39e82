"""Matmuls with a small weight, where cuBLAS spends its time on starting: of some hundred rows, and of a few.

The programs are many and short. Split-K: each split takes a share of the columns of x and stores a partial
sum in float32. The kernel that reads the result adds the partial sums, always in the same order.
"""

import triton
import triton.language as tl

from kakeya.kernels.gpu.device.pdl import prefetch, wait_for_predecessor
from kakeya.kernels.gpu.device.rowwise import UNGATED, activated


@triton.jit
def matmul(
    x_ptr, weight_ptr, out_ptr, rows, n,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, LINES: tl.constexpr,
    SPLITS: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, block of columns, split). A gated weight has 2 n rows: gate first."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    share: tl.constexpr = K // SPLITS
    first_row = weight_ptr + tl.minimum(column, n - 1).to(tl.int64) * K + tl.program_id(2) * share
    prefetch(first_row, share, LINES, PDL)
    if GATE != UNGATED:
        prefetch(first_row + n * K, share, LINES, PDL)
    wait_for_predecessor(PDL)
    k = tl.program_id(2) * share + tl.arange(0, DEPTH)
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


@triton.jit
def few_rows(
    x_ptr, weight_ptr, norm_ptr, residual_ptr, out_ptr, copy_ptr, eps, rows, n, copy_stride,
    K: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, DEPTH: tl.constexpr, LINES: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, COPY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs): the GEMV of device.rowwise for up to ROWS rows, on tensor cores.

    The weight is the left side of the product: a tensor core takes 16 rows there, and 8 columns are enough.
    """
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    first_row = weight_ptr + tl.minimum(output, n - 1).to(tl.int64) * K
    prefetch(first_row, K, LINES, PDL)
    if GATE != UNGATED:
        prefetch(first_row + n.to(tl.int64) * K, K, LINES, PDL)
    wait_for_predecessor(PDL)
    row, k = tl.arange(0, ROWS), tl.arange(0, DEPTH)
    # What is beyond the last row or output repeats it, and is not stored.
    x_at = x_ptr + tl.minimum(row, rows - 1)[:, None] * K + k[None, :]
    weight_at = first_row[:, None] + k[None, :]
    y = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    for start in range(0, K, DEPTH):
        weight = tl.load(weight_at + start)
        x = tl.load(x_at + start)
        if NORM:
            squares += tl.sum(x * x, 1)
            x = x * tl.load(norm_ptr + start + k)[None, :]
        x = x.to(weight.dtype).T
        y = tl.dot(weight, x, y)
        if GATE != UNGATED:
            up = tl.dot(tl.load(weight_at + n.to(tl.int64) * K + start), x, up)
    if NORM:
        scale = tl.rsqrt(squares / K + eps)[None, :]
        y, up = y * scale, up * scale
    if GATE != UNGATED:
        y = activated(y, GATE) * up
    stored = (output < n)[:, None] & (row < rows)[None, :]
    place = row[None, :] * n + output[:, None]
    if RESIDUAL:
        y += tl.load(residual_ptr + place, mask=stored, other=0.0)
    tl.store(out_ptr + place, y.to(out_ptr.dtype.element_ty), mask=stored)
    if COPY:
        copy_at = copy_ptr + row[None, :] * copy_stride + output[:, None]
        tl.store(copy_at, y.to(copy_ptr.dtype.element_ty), mask=stored)

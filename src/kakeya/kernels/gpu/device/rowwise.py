"""The small operations between matmuls, and the GEMV of a single row."""

import triton
import triton.language as tl

from kakeya.kernels.gpu.device.common import tanh
from kakeya.kernels.gpu.device.pdl import wait_for_predecessor

# The activation of a gated matmul's first half.
UNGATED = tl.constexpr(0)
SILU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)


@triton.jit(do_not_specialize_on_alignment=["token_ptr", "slab_ptr"])
def embed(
    table_ptr, token_ptr, newest_ptr, slab_ptr, hidden_ptr, scale, n,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, block of columns)."""
    wait_for_predecessor(PDL)
    row = tl.program_id(0)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slab, token = tl.load(slab_ptr + row), tl.load(token_ptr + row)
    newest = tl.load(newest_ptr + tl.maximum(slab, 0))
    token = tl.where(token < 0, newest, token).to(tl.int64)
    known = tl.where(slab < 0, 0, n)  # no columns for padding
    looked_up = tl.load(table_ptr + token * n + at, mask=at < known, other=0.0).to(tl.float32)
    tl.store(hidden_ptr + row * n + at, looked_up * scale, mask=at < n)


@triton.jit(do_not_specialize_on_alignment=["position_ptr"])
def rotations(
    position_ptr, frequency_ptr, out_ptr, capacity, factor, plane_stride,
    HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, at its own position or at the sinks')."""
    wait_for_predecessor(PDL)
    row, for_sinks = tl.program_id(0), tl.program_id(1)
    half = tl.arange(0, HALF)
    position = tl.load(position_ptr + row)
    position = tl.where(for_sinks == 1, tl.minimum(position, capacity - 1), position)
    frequency = tl.load(frequency_ptr + half)
    angles = position.to(tl.float64) * frequency
    growth = tl.where(frequency == 0.0, 1.0, factor)
    place = out_ptr + 2 * for_sinks * plane_stride + row * HALF + half
    tl.store(place, (tl.cos(angles) * growth).to(tl.float32))
    tl.store(place + plane_stride, (tl.sin(angles) * growth).to(tl.float32))


@triton.jit
def add_norm(
    hidden_ptr, addend_ptr, post_weight_ptr, weight_ptr, out_ptr, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row); BLOCK holds the whole row. SPLITS: how many partial sums the addend has."""
    wait_for_predecessor(PDL)
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < N
    hidden = tl.load(hidden_ptr + row * N + at, mask=inside, other=0.0)
    if SPLITS > 0:
        addend = tl.zeros([BLOCK], tl.float32)
        for split in tl.static_range(SPLITS):
            partial_at = addend_ptr + (split * tl.num_programs(0) + row) * N + at
            addend += tl.load(partial_at, mask=inside, other=0.0).to(tl.float32)
        if POST:
            scale = tl.rsqrt(tl.sum(addend * addend, 0) / N + eps)
            addend = addend * scale * tl.load(post_weight_ptr + at, mask=inside, other=0.0)
        hidden += addend
        tl.store(hidden_ptr + row * N + at, hidden, mask=inside)
    if NORM:
        scale = tl.rsqrt(tl.sum(hidden * hidden, 0) / N + eps)
        hidden = hidden * scale * tl.load(weight_ptr + at, mask=inside, other=0.0)
    tl.store(out_ptr + row * N + at, hidden.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def norm_rows(x_ptr, weight_ptr, eps, stride, N: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (row); BLOCK holds the whole row."""
    wait_for_predecessor(PDL)
    at = tl.arange(0, BLOCK)
    inside = at < N
    place = x_ptr + tl.program_id(0).to(tl.int64) * stride + at
    x = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    normed = x * scale * tl.load(weight_ptr + at, mask=inside, other=0.0)
    tl.store(place, normed.to(x_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activated(gate, GATE: tl.constexpr):
    if GATE == SILU:
        result = gate * tl.sigmoid(gate)
    else:
        result = 0.5 * gate * (1.0 + tanh(0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)))
    return result


@triton.jit
def gated(gate_up_ptr, out_ptr, width, BLOCK: tl.constexpr, GATE: tl.constexpr, PDL: tl.constexpr):
    """Program (row, block of columns)."""
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate_at = gate_up_ptr + row * 2 * width + at
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_at + width, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * width + at, (activated(gate, GATE) * up).to(out_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def _weights(weight_ptr, n, wanted, k, outputs, K: tl.constexpr, GATE: tl.constexpr):
    """A block of the weight, and of its second half where it is gated."""
    mask = wanted[:, None] & (k < K)[None, :]
    at = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    weight = tl.load(at, mask=mask, other=0.0)
    up_weight = weight
    if GATE != UNGATED:
        up_weight = tl.load(at + outputs.to(tl.int64) * K, mask=mask, other=0.0)
    return weight, up_weight


@triton.jit
def gemv(
    x_ptr, weight_ptr, norm_ptr, residual_ptr, out_ptr, copy_ptr, eps, outputs,
    K: tl.constexpr, OUTPUTS: tl.constexpr, COLUMNS: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATE: tl.constexpr, COPY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (block of outputs), with plain multiply-adds: tensor cores do not help a single row.

    The norm's scale is a factor of the whole row, so it is computed along the way and applied at the end.
    No kernel writes weights, so the first block of them comes while the predecessor runs.
    """
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    wanted = n < outputs
    k = tl.arange(0, COLUMNS)
    weight, up_weight = _weights(weight_ptr, n, wanted, k, outputs, K, GATE)
    wait_for_predecessor(PDL)
    first = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    second = tl.zeros([OUTPUTS, COLUMNS], tl.float32)
    squares = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, K, COLUMNS):
        if start > 0:
            weight, up_weight = _weights(weight_ptr, n, wanted, start + k, outputs, K, GATE)
        inside = start + k < K
        x = tl.load(x_ptr + start + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            squares += x * x
            x = x * tl.load(norm_ptr + start + k, mask=inside, other=0.0)
        first += weight.to(tl.float32) * x[None, :]
        if GATE != UNGATED:
            second += up_weight.to(tl.float32) * x[None, :]
    y, up = tl.sum(first, 1), tl.sum(second, 1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y, up = y * scale, up * scale
    if GATE != UNGATED:
        y = activated(y, GATE) * up
    if RESIDUAL:
        y += tl.load(residual_ptr + n, mask=wanted, other=0.0)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=wanted)
    if COPY:
        tl.store(copy_ptr + n, y.to(copy_ptr.dtype.element_ty), mask=wanted)

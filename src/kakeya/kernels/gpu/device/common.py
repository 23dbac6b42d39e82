"""What the attention kernels share: rotated heads, the soft cap, slots of tokens.

RoPE pairs dimension i with i + D / 2, so every head is loaded twice: as it is, and with its halves swapped.
"""

import triton
import triton.language as tl

MASKED = tl.constexpr(-1e30)  # a masked score. It is finite, so that the difference of two is no NaN


@triton.jit
def tanh(x):
    e = tl.exp(-2.0 * tl.abs(x))
    magnitude = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -magnitude, magnitude)


@triton.jit
def capped(scores, softcap, CAPPED: tl.constexpr):
    if CAPPED:
        scores = softcap * tanh(scores / softcap)
    return scores


@triton.jit
def rotated(x, swapped, cos, sin, D: tl.constexpr):
    """Heads [..., D]. The FMA is written out: otherwise the compiler may round differently elsewhere."""
    crossed = swapped * sin
    return tl.fma(x, cos, tl.where(tl.arange(0, D) < D // 2, -crossed, crossed))


@triton.jit
def heads_of_rows(at, real, norm_ptr, eps, D: tl.constexpr, QK_NORM: tl.constexpr):
    """Heads [columns, D] and the same with swapped halves: float32, normed, zero where not real."""
    dim = tl.arange(0, D)
    other = (dim + D // 2) % D
    x = tl.load(at[:, None] + dim[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    swapped = tl.load(at[:, None] + other[None, :], mask=real[:, None], other=0.0).to(tl.float32)
    if QK_NORM:
        scale = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
        x = x * scale * tl.load(norm_ptr + dim)[None, :]
        swapped = swapped * scale * tl.load(norm_ptr + other)[None, :]
    return x, swapped


@triton.jit
def rotated_rows(x, swapped, cos_at, rotation_stride, D: tl.constexpr):
    """Rotated by angles that each row of x has of its own: cos_at [rows]."""
    half = tl.arange(0, D) % (D // 2)
    at = cos_at[:, None] + half[None, :]
    return rotated(x, swapped, tl.load(at), tl.load(at + rotation_stride), D)


@triton.jit
def head_at(at, norm_ptr, eps, D: tl.constexpr, QK_NORM: tl.constexpr):
    """One head, and the same with its halves swapped: float32 [D], normed.

    The sum is float64, so its order does not matter.
    """
    dim = tl.arange(0, D)
    other = (dim + D // 2) % D
    x, swapped = tl.load(at + dim).to(tl.float32), tl.load(at + other).to(tl.float32)
    if QK_NORM:
        wide = x.to(tl.float64)
        scale = tl.rsqrt(tl.sum(wide * wide, 0).to(tl.float32) / D + eps)
        x, swapped = x * scale * tl.load(norm_ptr + dim), swapped * scale * tl.load(norm_ptr + other)
    return x, swapped


@triton.jit
def new_key(key_at, cos_ptr, sin_ptr, key_norm_ptr, eps, D: tl.constexpr, QK_NORM: tl.constexpr):
    """The key of one head of a row as it is stored: normed, rotated, rounded. The same bits everywhere."""
    x, swapped = head_at(key_at, key_norm_ptr, eps, D, QK_NORM)
    half = tl.arange(0, D) % (D // 2)
    key = rotated(x, swapped, tl.load(cos_ptr + half), tl.load(sin_ptr + half), D)
    return key.to(key_at.dtype.element_ty)


@triton.jit
def slot_of(position, sink, ring):
    return tl.where(position < sink, position, sink + (position - sink) % ring)

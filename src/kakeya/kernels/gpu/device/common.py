"""What the attention programs share: heads as halves, the soft cap, the running softmax, where tokens lie.

Rotation pairs dimension i with i + D / 2, so heads are held as two halves.
"""

import triton
import triton.language as tl

NOTHING = tl.constexpr(-1e30)  # a score that no softmax notices, and finite: the difference of two is no NaN


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
def rotated(x1, x2, cos, sin):
    """Fused by hand: left to itself, the compiler may round differently in different programs."""
    return tl.fma(x1, cos, -(x2 * sin)), tl.fma(x2, cos, x1 * sin)


@triton.jit
def normed_head(x1, x2, norm_ptr, eps, HALF: tl.constexpr):
    """One head [D / 2] twice. The sum is float64, and so the same in whatever order it is taken."""
    half = tl.arange(0, HALF)
    wide1, wide2 = x1.to(tl.float64), x2.to(tl.float64)
    mean = (tl.sum(wide1 * wide1, 0) + tl.sum(wide2 * wide2, 0)).to(tl.float32) / (2 * HALF)
    scale = tl.rsqrt(mean + eps)
    return x1 * scale * tl.load(norm_ptr + half), x2 * scale * tl.load(norm_ptr + HALF + half)


@triton.jit
def new_key(key_at, cos_ptr, sin_ptr, key_norm_ptr, eps, HALF: tl.constexpr, QK_NORM: tl.constexpr):
    """The key of one head of a row as it is stored: normed, rotated, rounded. The same bits everywhere."""
    half = tl.arange(0, HALF)
    k1 = tl.load(key_at + half).to(tl.float32)
    k2 = tl.load(key_at + HALF + half).to(tl.float32)
    if QK_NORM:
        k1, k2 = normed_head(k1, k2, key_norm_ptr, eps, HALF)
    k1, k2 = rotated(k1, k2, tl.load(cos_ptr + half), tl.load(sin_ptr + half))
    return k1.to(key_at.dtype.element_ty), k2.to(key_at.dtype.element_ty)


@triton.jit
def slot_of(position, sink, ring):
    return tl.where(position < sink, position, sink + (position - sink) % ring)


@triton.jit
def softmax_step(scores, seen, v, top, total, mixed):
    """Take a block of columns into the running softmax: top and total [rows], mixed [rows, D]."""
    scores = tl.where(seen, scores, NOTHING)
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.where(seen, tl.exp(scores - new_top[:, None]), 0.0)
    fade = tl.exp(top - new_top)
    total = total * fade + tl.sum(weights, 1)
    mixed = mixed * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return new_top, total, mixed

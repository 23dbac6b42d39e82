"""What drafting on the device needs beside the decoder's own operations.

A drafting step has a wave of rows for each place of the draft: row `place * sessions + session`.
"""

import triton
import triton.language as tl

from kakeya.kernels.gpu.device.draw import uniform
from kakeya.kernels.gpu.device.pdl import wait_for_predecessor
from kakeya.kernels.gpu.device.sampling import INFINITY, beta_of


@triton.jit
def _normed(x, weight_ptr, at, inside, eps, N: tl.constexpr):
    scale = tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    return x * scale * tl.load(weight_ptr + at, mask=inside, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["token_ptr", "slab_ptr"])
def draft_input(
    table_ptr, token_ptr, newest_ptr, slab_ptr, anchor_ptr, state_ptr, token_norm_ptr, state_norm_ptr,
    out_ptr, eps,
    N: tl.constexpr, BLOCK: tl.constexpr, ANCHORED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row); BLOCK holds half a row. ANCHORED: the state begins as the anchor of the row's slab."""
    wait_for_predecessor(PDL)
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    inside = at < N
    slab, token = tl.maximum(tl.load(slab_ptr + row), 0).to(tl.int64), tl.load(token_ptr + row)
    token = tl.where(token < 0, tl.load(newest_ptr + slab), token).to(tl.int64)
    embedding = tl.load(table_ptr + token * N + at, mask=inside, other=0.0).to(tl.float32)
    embedding = _normed(embedding, token_norm_ptr, at, inside, eps, N)
    if ANCHORED:
        state = tl.load(anchor_ptr + slab * N + at, mask=inside, other=0.0)
        tl.store(state_ptr + row * N + at, state, mask=inside)
    else:
        state = tl.load(state_ptr + row * N + at, mask=inside, other=0.0)
    state = _normed(state, state_norm_ptr, at, inside, eps, N)
    out_at = out_ptr + row * 2 * N + at
    tl.store(out_at, embedding.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(out_at + N, state.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def take_columns(hidden_ptr, out_ptr, out_stride, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program (row, block of columns): out[row, :n] = hidden[row]."""
    wait_for_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    hidden = tl.load(hidden_ptr + row * n + at, mask=at < n, other=0.0)
    tl.store(out_ptr + row * out_stride + at, hidden.to(out_ptr.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize_on_alignment=["slab_ptr", "picked_ptr"])
def keep_anchors(
    feature_ptr, picked_ptr, slab_ptr, anchor_ptr,
    N: tl.constexpr, BLOCK: tl.constexpr, PICKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): anchors[slab of the row] = the row's feature, or that of the row it picks."""
    wait_for_predecessor(PDL)
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    slab = tl.load(slab_ptr + row).to(tl.int64)
    if slab < 0:
        return
    source = tl.load(picked_ptr + row) if PICKED else row
    feature = tl.load(feature_ptr + source.to(tl.int64) * N + at, mask=at < N, other=0.0)
    tl.store(anchor_ptr + slab * N + at, feature, mask=at < N)


@triton.jit(
    do_not_specialize_on_alignment=[
        "slab_ptr", "temperature_ptr", "seed_ptr", "position_ptr", "sampled_ptr"
    ]
)  # fmt: skip
def choose_guess(
    logits_ptr, vocab_ptr, slab_ptr, temperature_ptr, seed_ptr, position_ptr, newest_ptr, sampled_ptr,
    row_stride, count,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row): the best of the row, or one drawn; sums are taken in float32."""
    wait_for_predecessor(PDL)
    row, lane = tl.program_id(0), tl.arange(0, BLOCK)
    slab = tl.load(slab_ptr + row).to(tl.int64)
    if slab < 0:
        return
    logits = logits_ptr + row.to(tl.int64) * row_stride
    top = tl.full([BLOCK], -INFINITY, tl.float32)
    where = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        x = tl.load(logits + start + lane, mask=start + lane < count, other=-INFINITY)
        better = x > top
        top, where = tl.where(better, x, top), tl.where(better, start + lane, where)
    best = tl.max(top, 0)
    place = tl.min(tl.where(top == best, where, count - 1), 0)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        beta = beta_of(temperature)
        total = tl.full([], 0.0, tl.float32)
        for start in range(0, count, BLOCK):
            total += tl.sum(_weights(logits, start + lane, count, best, beta), 0)
        target = uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row)).to(tl.float32) * total
        before, place = tl.full([], 0.0, tl.float32), tl.full([], 0, tl.int32)
        for start in range(0, count, BLOCK):
            running = before + tl.cumsum(_weights(logits, start + lane, count, best, beta), 0)
            place += tl.sum(((running <= target) & (start + lane < count)).to(tl.int32), 0)
            before = tl.max(running, 0)
        place = tl.minimum(place, count - 1)
    guess = tl.load(vocab_ptr + place)
    tl.store(sampled_ptr + row, guess)
    tl.store(newest_ptr + slab, guess)


@triton.jit
def _weights(logits, at, count, best, beta):
    x = tl.load(logits + at, mask=at < count, other=-INFINITY)
    return tl.exp((x - best) * beta)


@triton.jit(
    do_not_specialize_on_alignment=[
        "token_ptr", "sampled_ptr", "slab_ptr", "position_ptr", "sampling_position_ptr"
    ]
)  # fmt: skip
def judge_drafts(
    token_ptr, sampled_ptr, slab_ptr, position_ptr, sampling_position_ptr, newest_ptr,
    feature_ptr, anchor_ptr, run_ptr, sessions,
    N: tl.constexpr, BLOCK: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (session): how much of its draft is kept, and the tables of the step that follows."""
    wait_for_predecessor(PDL)
    session = tl.program_id(0)
    slab = tl.load(slab_ptr + session).to(tl.int64)
    if slab < 0:
        return
    kept, place_of_newest = 0, session
    for place in tl.static_range(COUNT):
        guess = tl.load(token_ptr + (place + 1) * sessions + session)
        right = (kept == place) & (guess == tl.load(sampled_ptr + place * sessions + session))
        kept += right.to(tl.int32)
    place_of_newest += kept * sessions
    run_at = run_ptr + session * (COUNT + 2)
    tl.store(run_at, kept + 1)
    position = tl.load(position_ptr + session) + kept + 1
    for place in tl.static_range(COUNT + 1):
        row = place * sessions + session
        tl.store(run_at + 1 + place, tl.load(sampled_ptr + row))
        tl.store(position_ptr + row, position + place)
        tl.store(sampling_position_ptr + row, position + place + 1)
    tl.store(token_ptr + session, -1)
    tl.store(newest_ptr + slab, tl.maximum(tl.load(sampled_ptr + place_of_newest), 0))
    at = tl.arange(0, BLOCK)
    feature = tl.load(feature_ptr + place_of_newest.to(tl.int64) * N + at, mask=at < N, other=0.0)
    tl.store(anchor_ptr + slab * N + at, feature, mask=at < N)

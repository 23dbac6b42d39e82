"""Both device attentions against the one-row-at-a-time reference, through several turns of the ring."""

from dataclasses import replace

import pytest
import torch

from kakeya.kernels.gpu import TILE_ROWS
from support.gpu_kernels import LAYER, Bench, Case, Sessions, same_bits

PLAIN = Case()
# Triton's interpreter takes its time for each head and row.
LEAN = replace(PLAIN, heads=1, capacity=20, spare=4, sinks=(2, 0, 9))
CASES = {
    "plain": PLAIN,
    "a head each, normed and capped": replace(LEAN, heads=2, kv_heads=2, head_norms=True, softcap=2.0),
    "four share one, local window": replace(LEAN, heads=4, local_window=5),
    "heads of 16": replace(LEAN, head_dim=16),
    "local window inside the sinks": replace(LEAN, local_window=15, sinks=(10, 2, 17)),
    "local window wider than ours": replace(LEAN, local_window=500),
    "hardly any ring": replace(LEAN, sinks=(19, 18, 14), spare=2),
    "no spare": replace(LEAN, spare=0),
}
# Steps: the rows that each session adds, for a capacity of 40. Single rows decode, more are a prompt.
STEPS = (
    {0: 3, 1: 1},
    {0: 34, 2: 19},
    {0: 1, 1: 1, 2: 1},
    {0: 14, 1: 45, 2: 2},
    {2: 1, 0: 1},
    {1: 4, 2: 25},
    {1: 1, 0: 1, 2: 1},
)


@pytest.mark.parametrize("name", CASES)
def test_attention_is_bounded_attention(bench: Bench, name: str) -> None:
    """Any mixture of prompts and single rows, with padding: the reference's numbers and its pool."""
    sessions = Sessions(bench, CASES[name], splits=2)
    for step in STEPS:
        singles = [sessions.block(session, 1) for session, rows in step.items() if rows == 1]
        long = {
            session: max(2, rows * sessions.case.capacity // 40) for session, rows in step.items() if rows > 1
        }
        prompts = [sessions.block(session, rows) for session, rows in long.items()]
        for blocks, run in ((singles, sessions.decode), (prompts, sessions.prefill)):
            if blocks:
                expected = sessions.expected(blocks)
                assert bench.near(run(blocks, padding=2), expected), (name, step)
    held = ~sessions.expected_pool.isnan()
    assert torch.equal(held, ~sessions.pool.isnan().cpu())  # nobody's slab and the other layer untouched
    assert bench.near(sessions.pool.cpu()[held], sessions.expected_pool[held])


@pytest.mark.parametrize("local_window", [0, 20, 70])
@pytest.mark.parametrize("sink", [0, 5, 33])
def test_rows_over_many_blocks(bench: Bench, sink: int, local_window: int) -> None:
    """Before the ring is full, at its end and after its wrap; beside what is seen lie numbers, or none."""
    case = replace(LEAN, capacity=150, spare=7, sinks=(sink, sink, sink), local_window=local_window)
    sessions = Sessions(bench, case, splits=2)
    for rows in (31, 60, 58, 5, 44, 121):
        sessions.expected([sessions.block(0, rows)])
        past = sessions.expected_pool.clone()
        single = sessions.block(0, 1)
        expected = sessions.expected([single])
        for unseen in (past, past.nan_to_num(9.0)):
            sessions.pool.copy_(unseen)
            assert bench.near(sessions.decode([single]), expected), sessions.lengths


def test_a_prompt_of_several_tiles(bench: Bench) -> None:
    """More rows than a tile, than the window and than the slab, at the beginning and later."""
    sessions = Sessions(bench, LEAN)
    for rows in (TILE_ROWS + 1, 2 * TILE_ROWS):
        blocks = [sessions.block(2, rows), sessions.block(0, 5)]
        expected = sessions.expected(blocks)
        assert bench.near(sessions.prefill(blocks), expected)


@pytest.mark.parametrize("splits", [1, 2, 4, 16])
@pytest.mark.parametrize(
    "case", [replace(PLAIN, heads=20), replace(PLAIN, heads=1, sinks=(39, 0, 17), head_norms=True)]
)
def test_splits_join_to_the_same_numbers(bench: Bench, case: Case, splits: int) -> None:
    sessions = Sessions(bench, case, splits=splits)
    past = [sessions.block(0, 60), sessions.block(2, 30)]
    sessions.expected(past)
    sessions.pool.copy_(sessions.expected_pool)
    for _ in range(2):  # the second finds the counters as the first left them
        singles = [sessions.block(0, 1), sessions.block(1, 1), sessions.block(2, 1)]
        expected = sessions.expected(singles)
        assert bench.near(sessions.decode(singles, padding=1), expected)
    assert not sessions.scratch.arrived.any()


@pytest.mark.parametrize("splits", [1, 4])
def test_a_row_has_the_same_bits_in_any_company(bench: Bench, splits: int) -> None:
    """Alone, in a batch, with padding before it in time, and as one of several rows of its session."""
    case = replace(PLAIN, heads=2, head_norms=True)
    together, alone, rounds = (Sessions(bench, case, splits=splits) for _ in range(3))
    norms = together.norms
    together.expected([together.block(0, 60), together.block(1, 11), together.block(2, 33)])
    for sessions in (together, alone, rounds):
        sessions.norms = norms
        sessions.pool.copy_(together.expected_pool)
    blocks = [together.block(session, 1) for session in (0, 1, 2, 0, 1, 2, 0, 2)]
    outputs = torch.cat([together.decode(blocks[:3], padding=3), together.decode(blocks[3:6])])
    outputs = torch.cat([outputs, together.decode(blocks[6:], padding=1)])
    assert same_bits(outputs, torch.cat([alone.decode([block]) for block in blocks]))
    rounds.store(blocks, padding=2)
    assert same_bits(rounds.decode(blocks, padding=1), outputs)
    assert same_bits(together.pool, alone.pool)
    assert same_bits(together.pool, rounds.pool)


def test_storing_is_what_decoding_stores(bench: Bench) -> None:
    case = replace(LEAN, heads=2, head_norms=True)
    stored, decoded = Sessions(bench, case), Sessions(bench, case)
    decoded.norms = stored.norms
    blocks = [stored.block(0, 1), stored.block(2, 1), stored.block(1, 1)]
    stored.store(blocks, padding=2)
    decoded.decode(blocks)
    assert same_bits(stored.pool, decoded.pool)
    assert not stored.pool[:, LAYER, :, :, 0].isnan().all()


def test_padding_alone_touches_nothing(bench: Bench) -> None:
    sessions = Sessions(bench, LEAN, splits=4)
    sessions.prefill([sessions.block(1, 50)])  # slab 0, which a careless index of -1 would come to
    before = sessions.pool.clone()
    strangers = [sessions.block(1, 1), sessions.block(0, 1)]
    rows = bench.rows([-1, -1], [0, 7], [0, 4])
    qkv, rotations = sessions.together(strangers, 0)
    case, layer = sessions.case, sessions.layer
    out = bench.unset(2, case.heads * case.head_dim)
    bench.kernels.decode_attention(qkv, layer, rotations, rows, sessions.splits, sessions.scratch, out)
    bench.kernels.store_rows(qkv, layer, rotations, rows)
    assert same_bits(sessions.pool, before)
    assert not sessions.scratch.arrived.any()


def test_a_broken_session_harms_no_other(bench: Bench) -> None:
    """Keys and values that are no numbers, in a prompt and in a slab, show in their own session alone."""
    sound, harmed = Sessions(bench, LEAN), Sessions(bench, LEAN)
    blocks = [sound.block(0, 30), sound.block(1, 20)]
    broken = replace(blocks[1], qkv=blocks[1].qkv * float("nan"))
    assert same_bits(harmed.prefill([blocks[0], broken])[:30], sound.prefill(blocks)[:30])
    singles = [sound.block(0, 1), sound.block(1, 1)]
    outputs = harmed.decode(singles)
    assert same_bits(outputs[:1], sound.decode(singles)[:1])
    assert outputs[1].isnan().any()

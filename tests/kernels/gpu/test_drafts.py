"""What a drafting step needs: attention of a few new tokens, small matmuls, the drafter's input, judging."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from kakeya.engine import sampler
from kakeya.kernels.gpu import DraftTable, SamplingTable, triton_attention
from support.gpu_kernels import Bench, Case, Sessions, same_bits

LEAN = Case(heads=1, head_dim=16, capacity=20, spare=8, sinks=(2, 0, 9))
CASES = {
    "three share one": replace(LEAN, heads=3),
    "a head each, normed and capped": replace(LEAN, heads=2, kv_heads=2, head_norms=True, softcap=2.0),
    "local window": replace(LEAN, local_window=3),
    "local window inside the sinks": replace(LEAN, local_window=15, sinks=(10, 2, 17)),
    "hardly any ring": replace(LEAN, sinks=(19, 18, 14)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("places", "splits"), [(4, 1), (8, 2)])
@pytest.mark.parametrize("reads_together", [False, True])
def test_new_tokens_attend(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str, places: int, splits: int, reads_together: bool
) -> None:
    """From the first token on, through a turn of the ring, beside a session of padding."""
    monkeypatch.setattr(triton_attention, "READ_TOGETHER", 1 if reads_together else 99)
    sessions = Sessions(bench, CASES[name], splits=splits)
    sessions.prefill([sessions.block(1, 13)])
    sessions.expected_pool.copy_(sessions.pool)
    for _ in range(2 + 24 // places):
        blocks = [sessions.block(session, places) for session in (2, 1)]
        expected = sessions.expected(blocks)
        assert bench.near(sessions.draft(blocks, padding=1), expected)
    held = ~sessions.expected_pool.isnan()
    assert torch.equal(held, ~sessions.pool.isnan().cpu())
    assert bench.near(sessions.pool.cpu()[held], sessions.expected_pool[held])


def test_padding_alone_attends_to_nothing(bench: Bench) -> None:
    sessions = Sessions(bench, LEAN, splits=2)
    before = sessions.pool.clone()
    qkv, rotations = sessions.together([sessions.block(0, 4)], 0)
    rows = bench.rows([-1] * 4, [0] * 4, [0] * 4)
    out = bench.unset(4, sessions.case.heads * sessions.case.head_dim)
    bench.kernels.draft_attention(qkv, sessions.layer, rotations, rows, 1, 2, sessions.scratch, out)
    assert same_bits(sessions.pool, before)


@pytest.mark.parametrize("rows", [2, 8, 11])
def test_a_few_rows_are_normed_gated_and_added(bench: Bench, rows: int) -> None:
    hidden, norm, inner = bench.floats(rows, 64), bench.floats(64), 40
    gate_up, down = bench.element(2 * inner, 64), bench.element(64, 128)
    if bench.device.type == "cuda" and not bench.kernels.fuses_rows(rows, gate_up):
        pytest.skip("several rows of this type are not computed so on a device")
    gated, expected = bench.unset(rows, inner), functional.rms_norm(hidden, (64,), norm, 1e-6)
    gate, up = functional.linear(expected.float(), gate_up.float()).chunk(2, 1)
    bench.kernels.gemv(hidden, gate_up, gated, norm=norm, eps=1e-6, gate="silu")
    assert bench.near(gated, functional.silu(gate) * up, slack=2)
    wide, copies = bench.element(rows, 128), bench.unset(rows, 192)
    expected = hidden + functional.linear(wide.float(), down.float())
    bench.kernels.gemv(wide, down, hidden, residual=hidden, copy=copies[:, 64:128])
    assert bench.near(hidden, expected)
    assert torch.equal(copies[:, 64:128], hidden.to(bench.dtype))
    assert copies[:, [*range(64), *range(128, 192)]].isnan().all()


def test_a_drafter_reads_the_newest_token_and_its_anchor(bench: Bench) -> None:
    table, anchors, weights = bench.element(9, 24), bench.floats(5, 24), bench.floats(2, 24)
    rows = bench.rows([3, 1, -1], [0, 0, 0], [0, 0, 0])
    tokens, newest = bench.ints([-1, 4, 0]), bench.ints([0, 0, 0, 7, 0])
    state, out = bench.floats(3, 24), bench.unset(3, 48)
    later, drafts = state.clone(), bench.kernels.drafts
    drafts.input(table, tokens, newest, rows, anchors, state, weights[0], weights[1], 1e-6, out)
    assert torch.equal(state[:2], anchors[[3, 1]])
    embedding = functional.rms_norm(table[[7, 4]].float(), (24,), weights[0], 1e-6)
    assert bench.near(out[:2, :24], embedding)
    assert bench.near(out[:2, 24:], functional.rms_norm(anchors[[3, 1]], (24,), weights[1], 1e-6))
    drafts.input(table, tokens, newest, rows, None, later, weights[0], weights[1], 1e-6, out)
    assert bench.near(out[:, 24:], functional.rms_norm(later, (24,), weights[1], 1e-6))


def test_a_guess_is_the_best_or_one_that_is_drawn(bench: Bench) -> None:
    """Over more columns than a program reads at once, in ids that the drafter knows; nothing for padding."""
    columns, count = 9000, 6
    ids = torch.arange(columns) * 3 + 1
    logits = 3 * torch.randn(count, columns)
    temperatures, seeds = [0.0, 0.7, 1.0, 0.3, 2.0, 1.0], [1, 2, 3, 4, 5, 6]
    positions = [7, 8, 9, 10, 11, 12]
    rows = bench.rows([4, 0, 2, 1, 5, -1], positions, [0] * count)
    zeros = torch.zeros(count, device=bench.device)
    sampling = SamplingTable(
        temperature=bench.put(torch.tensor(temperatures)),
        top_k=zeros.int(),
        top_p=zeros + 1,
        min_p=zeros,
        seed=bench.put(torch.tensor(seeds)),
        positions=bench.ints(positions),
    )
    newest, sampled = bench.ints([0] * 6), bench.ints([-7] * count)
    bench.kernels.drafts.choose(bench.put(logits), bench.put(ids.int()), rows, sampling, newest, sampled)
    expected = [int(ids[logits[0].argmax()])]
    for row in range(1, count - 1):
        shares = (logits[row].double() / temperatures[row]).softmax(0).cumsum(0)
        number = sampler.uniform(seeds[row], positions[row])
        # float32 sums may end a hair before or behind the border of two tokens.
        near = torch.searchsorted(shares, torch.tensor([number - 1e-5, number + 1e-5], dtype=torch.float64))
        assert int(near[0]) <= int((sampled[row].cpu() - 1) // 3) <= int(near[1])
        expected.append(int(sampled[row]))
    assert sampled.tolist() == [*expected, -7]
    assert newest.tolist() == [expected[1], expected[3], expected[2], 0, expected[0], expected[4]]


def test_columns_are_taken(bench: Bench) -> None:
    hidden, out = bench.floats(3, 24), bench.unset(3, 72)
    bench.kernels.drafts.take_columns(hidden, out[:, 24:48])
    assert torch.equal(out[:, 24:48], hidden.to(bench.dtype))
    assert out[:, :24].isnan().all()
    assert out[:, 48:].isnan().all()


def test_anchors_are_kept_by_slab(bench: Bench) -> None:
    features, anchors = bench.floats(4, 24), bench.floats(5, 24)
    expected = anchors.clone()
    bench.kernels.drafts.keep_anchors(features, None, bench.ints([2, -1, 0, 4]), anchors)
    expected[[2, 0, 4]] = features[[0, 2, 3]]
    assert torch.equal(anchors, expected)
    bench.kernels.drafts.keep_anchors(features, bench.ints([3, 1]), bench.ints([0, -1]), anchors)
    expected[0] = features[3]
    assert torch.equal(anchors, expected)


def test_a_draft_is_kept_as_far_as_it_is_right(bench: Bench) -> None:
    """Four sessions: all right, none right, right again behind a wrong one, and padding."""
    guesses = [[11, 12, 13], [21, 22, 23], [31, 0, 33], [7, 7, 7]]
    chosen = [[11, 12, 13, 14], [20, 22, 23, 24], [31, 32, 33, 34], [9, 9, 9, 9]]
    sessions, slabs = 4, [3, 0, 2, -1]
    tokens = bench.ints([-1] * 4 + [guesses[s][place] for place in range(3) for s in range(4)])
    sampled = bench.ints([chosen[s][place] for place in range(4) for s in range(4)])
    positions = bench.ints([10 * s + place for place in range(4) for s in range(4)])
    table = DraftTable(tokens, bench.ints(slabs * 4), positions, positions.clone())
    newest, anchors, features = bench.ints([0] * 5), bench.floats(5, 24), bench.floats(16, 24)
    runs = torch.zeros(sessions, 5, dtype=torch.int32, device=bench.device)
    bench.kernels.drafts.judge(table, sampled, newest, features, anchors, runs)
    assert runs[:3].tolist() == [[4, *chosen[0]], [1, *chosen[1]], [2, *chosen[2]]]
    assert [newest[slab].item() for slab in slabs[:3]] == [14, 20, 32]
    for slab, row in zip(slabs[:3], (3 * 4 + 0, 0 * 4 + 1, 1 * 4 + 2), strict=True):
        assert torch.equal(anchors[slab], features[row])
    starts = [0 + 4, 10 + 1, 20 + 2]
    for s, start in enumerate(starts):
        assert table.positions[s::4].tolist() == [start + place for place in range(4)]
        assert table.sampling_positions[s::4].tolist() == [start + place + 1 for place in range(4)]
        assert table.token_ids[s].item() == -1

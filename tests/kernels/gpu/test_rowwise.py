"""The operations between matmuls, and our matmuls, against float64."""

from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kakeya.kernels.gpu import MAX_K_SPLITS, MAX_KV_SPLITS, MAX_MATMUL_ROWS, kv_splits
from kakeya.kernels.gpu.launches import gemv_launch, own_k_splits, tile_launch
from kakeya.models.rope import Llama3Scaling, RopeConfig, inverse_frequencies, rope_tables
from support.gpu_kernels import Bench, same_bits

Activation = Literal["silu", "gelu_tanh"]
EPS = 1e-5


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight.double()


def activated(gate: Tensor, activation: Activation) -> Tensor:
    return functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")


@pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])
def test_embed_takes_given_and_sampled_tokens(bench: Bench, table_dtype: torch.dtype) -> None:
    table = bench.floats(11, 1100).to(table_dtype)
    rows = bench.rows([2, 0, -1, 1, -1], [0] * 5, [0] * 5)
    hidden = bench.unset(5, 1100, dtype=torch.float32)
    bench.kernels.embed(table, bench.ints([7, -1, -1, -1, 3]), bench.ints([5, 10, 0]), rows, 1.5, hidden)
    expected = table[bench.ints([7, 5, 0, 10, 0])].float() * 1.5
    expected[[2, 4]] = 0.0
    assert torch.equal(hidden, expected)


@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_rotations_are_right_at_far_positions(bench: Bench, factor: float) -> None:
    rope = RopeConfig(head_dim=32, theta=500_000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))
    positions = [0, 1, 39, 40, 12_345_678, 2**31 - 1]
    frequencies = bench.put(torch.tensor(inverse_frequencies(rope)))
    out = bench.unset(4, len(positions), 16, dtype=torch.float32)
    rows = bench.rows([0] * 6, positions, [4] * 6)
    bench.kernels.rotations(rows, 40, frequencies, factor, out)
    expected = torch.stack([*rope_tables(rope, positions), *rope_tables(rope, np.minimum(positions, 39))])
    assert torch.allclose(out.cpu(), expected * factor, rtol=1e-6, atol=1e-7)


def test_pairs_that_do_not_turn_do_not_grow(bench: Bench) -> None:
    frequencies = bench.put(torch.tensor([0.5] * 8 + [0.0] * 8, dtype=torch.float64))
    out = bench.unset(4, 2, 16, dtype=torch.float32)
    bench.kernels.rotations(bench.rows([0, 0], [0, 7], [4, 4]), 40, frequencies, 1.5, out)
    assert torch.equal(out[0, 0].cpu(), torch.tensor([1.5] * 8 + [1.0] * 8))
    assert torch.equal(out[:2, 1, 8:].cpu(), torch.tensor([1.0, 0.0])[:, None].expand(2, 8))


@pytest.mark.parametrize("width", [32, 1100])
def test_norm_of_some_columns_in_place(bench: Bench, width: int) -> None:
    whole, weight = bench.element(3, width + 24), bench.floats(width)
    before = whole.clone()
    bench.kernels.norm_rows(whole[:, 8 : 8 + width], weight, EPS)
    assert bench.near(whole[:, 8 : 8 + width], rms_norm(before[:, 8 : 8 + width], weight))
    assert torch.equal(whole[:, :8], before[:, :8])
    assert torch.equal(whole[:, 8 + width :], before[:, 8 + width :])
    bench.kernels.norm_rows(before[1:2, 8 : 8 + width], weight, EPS)
    assert same_bits(before[1:2], whole[1:2])


def test_add_norm_without_a_norm(bench: Bench) -> None:
    hidden, added, post = bench.floats(3, 576), bench.element(3, 576), bench.floats(576)
    expected, out = hidden.double() + rms_norm(added, post), bench.unset(3, 576)
    bench.kernels.add_norm(hidden, added, post, None, EPS, out)
    assert bench.near(hidden, expected)
    assert torch.equal(out, hidden.to(out.dtype))


@pytest.mark.parametrize("width", [576, 1100])
@pytest.mark.parametrize("addend", ["nothing", "element", "float32", "normed"])
def test_add_norm(bench: Bench, width: int, addend: str) -> None:
    hidden, weight, post = bench.floats(3, width), bench.floats(width), bench.floats(width)
    added = bench.element(3, width) if addend != "float32" else bench.floats(3, width)
    expected = hidden.double()
    if addend != "nothing":
        expected = expected + (rms_norm(added, post) if addend == "normed" else added.double())
    out = bench.unset(3, width)
    arguments = (None if addend == "nothing" else added, post if addend == "normed" else None, weight, EPS)
    alone, alone_out = hidden[1:2].clone(), bench.unset(1, width)
    bench.kernels.add_norm(hidden, *arguments, out)
    assert bench.near(hidden, expected)
    assert bench.near(out, rms_norm(expected, weight))
    arguments = (None if addend == "nothing" else added[1:2], *arguments[1:])
    bench.kernels.add_norm(alone, *arguments, alone_out)
    assert same_bits(torch.cat([alone, alone_out]), torch.cat([hidden[1:2], out[1:2]]))


def test_add_norm_adds_up_partial_sums(bench: Bench) -> None:
    hidden, partials, weight = bench.floats(3, 576), bench.floats(4, 3, 576), bench.floats(576)
    expected = hidden.double() + partials.double().sum(0)
    out = bench.unset(3, 576)
    bench.kernels.add_norm(hidden, partials, None, weight, EPS, out)
    assert bench.near(hidden, expected)
    assert bench.near(out, rms_norm(expected, weight))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [24, 1100])
def test_gated(bench: Bench, activation: Activation, width: int) -> None:
    gate_up = 3 * bench.element(4, 2 * width)
    out, alone = bench.unset(4, width), bench.unset(1, width)
    bench.kernels.gated(gate_up, activation, out)
    gate, up = gate_up.double().chunk(2, -1)
    assert bench.near(out, activated(gate, activation) * up)
    bench.kernels.gated(gate_up[2:3], activation, alone)
    assert same_bits(alone, out[2:3])


@pytest.mark.parametrize(("outputs", "columns"), [(10, 24), (31, 576), (5, 2500)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("end", ["plain", "residual", "silu", "gelu_tanh"])
def test_gemv(bench: Bench, outputs: int, columns: int, norm: bool, end: str) -> None:
    gated = end in ("silu", "gelu_tanh")
    weight = bench.element(2 * outputs if gated else outputs, columns) * columns**-0.5
    scale = bench.floats(columns)
    x = bench.floats(1, columns) if norm else bench.element(1, columns)
    result = (rms_norm(x, scale) if norm else x.double()) @ weight.double().T
    options = {"norm": scale, "eps": EPS} if norm else {}
    if gated:
        gate, up = result.chunk(2, -1)
        out, expected = bench.unset(1, outputs), activated(gate, end) * up
        bench.kernels.gemv(x, weight, out, gate=end, **options)
    elif end == "residual":
        out = bench.floats(1, outputs)  # added to in place
        expected = result + out
        bench.kernels.gemv(x, weight, out, residual=out, **options)
    else:
        out, expected = bench.unset(1, outputs), result
        bench.kernels.gemv(x, weight, out, **options)
    assert bench.near(out, expected)


@pytest.mark.parametrize(
    ("rows", "outputs", "columns"),
    [(1, 16, 64), (5, 40, 576), (67, 130, 192), (64, 96, 1536), (130, 17, 640)],
)
@pytest.mark.parametrize("end", ["plain", "split-k", "silu", "gelu_tanh"])
def test_matmul_of_several_rows(bench: Bench, rows: int, outputs: int, columns: int, end: str) -> None:
    gated = end in ("silu", "gelu_tanh")
    x = bench.element(rows, columns)
    weight = bench.element(2 * outputs if gated else outputs, columns) * columns**-0.5
    expected = x.double() @ weight.double().T
    if gated:
        gate, up = expected.chunk(2, -1)
        out, expected = bench.unset(rows, outputs), activated(gate, end) * up
        bench.kernels.matmul(x, weight, out, gate=end)
    elif end == "split-k":
        launch = tile_launch(rows, outputs, columns, MAX_K_SPLITS)
        assert launch is not None
        out = bench.unset(launch.splits, rows, outputs, dtype=torch.float32)
        bench.kernels.matmul(x, weight, out)
        out = out.sum(0)
    else:
        out = bench.unset(rows, outputs)
        bench.kernels.matmul(x, weight, out)
    assert bench.near(out, expected)


def test_tiles_all_run_at_once_or_are_left_to_cublas() -> None:
    taken = {
        (256, 960, 576, 1): (32, 1),
        (256, 576, 576, 4): (32, 1),
        (256, 1536, 576, 1): (64, 1),
        (256, 576, 1536, 4): (64, 3),
        (64, 576, 1536, 4): (16, 3),
        (64, 576, 1536, 2): (16, 2),
        (2, 960, 576, 1): (16, 1),
    }
    for asked, (width, splits) in taken.items():
        launch = tile_launch(*asked)
        assert launch is not None
        assert (launch.columns, launch.splits) == (width, splits), asked
    for large in (
        (256, 6144, 4096, 1),
        (256, 4096, 1024, 1),
        (MAX_MATMUL_ROWS + 1, 16, 64, 1),
        (8, 960, 100, 4),
    ):
        assert tile_launch(*large) is None, large


def test_our_matmuls_have_whole_tiles_and_short_sums() -> None:
    asked = {(64, 960, 576, 1): 1, (256, 576, 1536, 4): 3, (64, 1024, 3072, 4): 4}
    for matmul, splits in asked.items():
        assert own_k_splits(*matmul) == splits, matmul
    for matmul in ((32, 960, 576, 1), (96, 960, 576, 1), (64, 6144, 4096, 1), (256, 4096, 1024, 1)):
        assert own_k_splits(*matmul) == 0, matmul


@pytest.mark.parametrize("gated", [False, True])
def test_gemv_launches_fit_every_shape(gated: bool) -> None:
    for rows, columns in ((6144, 4096), (576, 576), (24576, 4096), (3584, 2560), (8, 8), (151936, 1024)):
        launch = gemv_launch(rows, columns, gated)
        for size in (launch.outputs, launch.columns, launch.warps):
            assert size & (size - 1) == 0
        assert launch.outputs * launch.columns <= 16384


def test_splits_fill_the_device_and_no_more() -> None:
    splits = {0: MAX_KV_SPLITS, 1: 16, 4: 16, 5: 8, 8: 8, 33: 1, 64: 1, 500: 1}
    assert {rows: kv_splits(rows, 8) for rows in splits} == splits
    assert [kv_splits(64, kv_heads) for kv_heads in (1, 3, 4, 8, 9)] == [8, 2, 2, 1, 1]

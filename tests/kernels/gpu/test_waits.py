"""The torch kernels never wait for the device: on one that holds no numbers, asking for any would raise."""

import pytest
import torch

from kakeya.kernels.gpu import DraftTable, SamplingScratch, SamplingTable, load_gpu_kernels
from kakeya.types import KernelChoice
from support.gpu_kernels import Bench, Case, Sessions


@pytest.fixture
def numberless() -> Bench:
    device = torch.device("meta")
    return Bench(load_gpu_kernels(device, KernelChoice.TORCH), device, torch.bfloat16)


def test_attention_asks_for_no_number(numberless: Bench) -> None:
    sessions = Sessions(numberless, Case(head_norms=True, softcap=2.0, local_window=9))
    block = sessions.block(0, 20)
    for result in (sessions.decode([block], padding=2), sessions.prefill([block], padding=2)):
        assert result.shape == (20, 3 * 32)
    sessions.store([block], padding=2)


def test_the_rest_asks_for_no_number(numberless: Bench) -> None:
    bench = numberless
    kernels, rows = bench.kernels, bench.rows([0, -1], [3, 4], [0, 0])
    hidden, weight = bench.floats(2, 576), bench.floats(576)
    floats, ints = bench.floats(2), bench.ints([1, 2])
    kernels.embed(bench.element(9, 576), ints, ints, rows, 1.0, hidden)
    kernels.rotations(rows, 8, bench.floats(16).double(), 1.0, bench.unset(4, 2, 16, dtype=torch.float32))
    kernels.add_norm(hidden, bench.element(2, 576), weight, weight, 1e-6, bench.unset(2, 576))
    kernels.gated(bench.element(2, 48), "gelu_tanh", bench.unset(2, 24))
    kernels.gemv(hidden[:1], bench.element(48, 576), bench.unset(1, 24), norm=weight, gate="silu")
    kernels.matmul(bench.element(2, 576), bench.element(48, 576), bench.unset(2, 24), gate="silu")
    kernels.matmul(bench.element(2, 576), bench.element(48, 576), bench.unset(3, 2, 48, dtype=torch.float32))
    sampling = SamplingTable(floats, ints, floats, floats, ints.long(), ints)
    scratch = SamplingScratch.of(2, 99, bench.device)
    kernels.sample(bench.floats(2, 99), rows, sampling, scratch, ints, ints)


def test_what_a_drafter_needs_asks_for_no_number(numberless: Bench) -> None:
    bench = numberless
    rows, ints, state = bench.rows([0, -1], [3, 4], [0, 0]), bench.ints([1, 2]), bench.floats(2, 576)
    norm, anchors, drafts = bench.floats(576), bench.floats(2, 576), bench.kernels.drafts
    out = bench.unset(2, 1152)
    drafts.input(bench.element(9, 576), ints, ints, rows, anchors, state, norm, norm, 1e-6, out)
    drafts.take_columns(state, out[:, 576:])
    drafts.keep_anchors(state, ints, ints, anchors)
    runs = torch.zeros(2, 3, dtype=torch.int32, device=bench.device)
    table = DraftTable(*(bench.ints([0] * 4) for _ in range(4)))
    drafts.judge(table, bench.ints([0] * 4), ints, bench.floats(4, 576), anchors, runs)
    floats = bench.floats(2)
    sampling = SamplingTable(floats, ints, floats, floats, ints.long(), ints)
    drafts.choose(bench.floats(2, 99), bench.ints([*range(99)]), rows, sampling, ints, bench.ints([0, 0]))
    sessions = Sessions(bench, Case(), splits=2)
    assert sessions.draft([sessions.block(0, 4)]).shape == (4, 3 * 32)

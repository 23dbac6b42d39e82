"""Triton's programs through its compiler, for a device that need not be here.

The interpreter runs what the compiler refuses: a name of two types, a matmul too narrow for tensor cores.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kakeya.engine.cuda.decoder import EXACT_SPLITS
from kakeya.kernels.gpu import (
    TILE_ROWS,
    DraftTable,
    SamplingScratch,
    SamplingTable,
    launches,
    triton_attention,
)
from support.gpu_kernels import Bench, Case, Sessions
from support.untraced import untraced

_TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_SHARED_MEMORY = 232_448  # bytes that one program may have on a Hopper chip

pytestmark = pytest.mark.slow


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Launches compile their program instead, for an H200; the list has the names."""
    if "TRITON_INTERPRET" in os.environ or torch.cuda.is_available():
        pytest.skip("nothing is compiled in the interpreter, and everything where there is a device")
    jit = pytest.importorskip("triton.runtime.jit", reason="Triton is not installed here")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # what it does anyway, but without a warning
    names: list[str] = []
    monkeypatch.setattr(jit.JITFunction, "run", _compiler(names))
    return names


def _compiler(names: list[str]) -> Callable[..., None]:
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def run(program: Any, *args: object, grid: object, warmup: bool, **options: Any) -> None:
        del grid, warmup
        given = dict(zip(program.arg_names, args, strict=False)) | options
        constants, attributes, signature = {}, {}, {}
        for at, parameter in enumerate(program.params):
            value = given[parameter.name]
            if parameter.is_constexpr:
                constants[(at,)], signature[parameter.name] = getattr(value, "value", value), "constexpr"
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + _TYPES[value.dtype]
                attributes[(at,)] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
        launch = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
        source = ASTSource(program, signature, constants, attributes)
        target = GPUTarget("cuda", 90, 32)
        built = untraced(lambda: build(source, target=target, options=launch))
        assert built.metadata.shared <= _SHARED_MEMORY
        if given["PDL"]:
            _check_pdl(built.asm["ptx"], reads_weights_early=program.__name__ == "gemv")
        names.append(program.__name__)

    return run


def _check_pdl(code: str, *, reads_weights_early: bool) -> None:
    """With PDL a kernel first waits for its predecessor, and then lets the next one be placed. Before that it
    may ask for weights, which no kernel writes."""
    early, waiting, late = code.partition("griddepcontrol.wait")
    assert waiting
    assert not re.search(r"(st|atom|red)\S*\.global|cp\.async", early)
    assert reads_weights_early == bool(re.search(r"ld\S*\.global", early))
    assert re.search(r"(ld|st|atom|red)\S*\.global|cp\.async", late)
    assert "griddepcontrol.launch_dependents" in late


def _bench() -> Bench:
    from kakeya.kernels.gpu.triton_kernels import TritonKernels

    return Bench(TritonKernels(pdl=True), torch.device("cpu"), torch.bfloat16)


PREFILL = ["prepare_rows", "prefill_attention", "keep_rows"]
ATTENTION = ["decode_attention", "store_rows", *PREFILL]


@pytest.mark.parametrize(
    ("case", "splits"),
    [
        (Case(head_dim=16, softcap=2.0), 4),
        (Case(head_dim=128, heads=4, head_norms=True), 8),
        (Case(head_dim=128, heads=7, kv_heads=1), 1),
        (Case(head_dim=256, heads=4, kv_heads=2), 2),
    ],
)
def test_attention_compiles(compiled: list[str], case: Case, splits: int) -> None:
    sessions = Sessions(_bench(), case, splits=splits)
    block = sessions.block(0, 2)
    sessions.decode([block])
    sessions.store([block])
    sessions.prefill([block])
    assert compiled == ATTENTION


def test_attention_over_many_sessions_does_without_pdl(monkeypatch: pytest.MonkeyPatch) -> None:
    if "TRITON_INTERPRET" in os.environ:
        pytest.skip("the interpreter launches in another way")
    jit = pytest.importorskip("triton.runtime.jit", reason="Triton is not installed here")
    launched: list[tuple[str, bool, bool]] = []

    def note(program: Any, *args: object, grid: object, warmup: bool, **options: Any) -> None:
        launched.append((program.__name__, options["PDL"], options.get("launch_pdl", False)))

    monkeypatch.setattr(jit.JITFunction, "run", note)
    monkeypatch.setattr(launches, "FEW_PROGRAMS", 3)
    sessions = Sessions(_bench(), Case(heads=3, kv_heads=1))
    for rows in (3, 4):
        sessions.decode([sessions.block(0, rows)])
    sessions.store([sessions.block(0, 4)])
    for rows in (TILE_ROWS, TILE_ROWS + 1):
        sessions.prefill([sessions.block(0, rows)])
    assert launched == [
        ("decode_attention", True, True),
        ("decode_attention", False, False),
        ("store_rows", True, True),
        *[(name, True, True) for name in PREFILL],
        *[(name, False, False) for name in PREFILL],
    ]


@pytest.mark.parametrize(("head_dim", "itemsize"), [(64, 2), (128, 2), (128, 4), (256, 4)])
@pytest.mark.parametrize("columns", [8, 16])
def test_split_attention_is_the_same_program_for_every_batch(
    head_dim: int, itemsize: int, columns: int
) -> None:
    """Exact numerics always split."""
    assert EXACT_SPLITS > 1
    for splits in (2, 4, 8, 16):
        sizes = [3 * splits * rows for rows in (1, 64, 4096)]
        assert len({launches.decode_launch(head_dim, itemsize, columns, splits, size) for size in sizes}) == 1


def test_attention_of_many_sessions_fits_on_a_device_at_once() -> None:
    """256 sessions with 8 key heads, on 132 SMs with 65,536 registers each."""
    programs = 256 * 8
    launch = launches.decode_launch(128, 2, 8, 1, programs)
    assert launch.registers is not None
    assert 65_536 // (launch.registers * 32 * launch.warps) * 132 >= programs


def test_the_rest_compiles(compiled: list[str]) -> None:
    bench = _bench()
    kernels, rows = bench.kernels, bench.rows([0, 1], [3, 4], [0, 0])
    hidden, weight = bench.floats(2, 576), bench.floats(576)
    kernels.embed(bench.element(9, 576), bench.ints([1, 2]), bench.ints([0, 0]), rows, 1.0, hidden)
    kernels.rotations(rows, 8, bench.floats(16).double(), 1.0, bench.unset(4, 2, 16, dtype=torch.float32))
    kernels.add_norm(hidden, bench.element(2, 576), weight, weight, 1e-6, bench.unset(2, 576))
    kernels.gated(bench.element(2, 48), "gelu_tanh", bench.unset(2, 24))
    matrix, out = bench.element(48, 576), bench.unset(1, 24)
    kernels.gemv(hidden[:1], matrix, out, norm=weight, gate="silu")
    kernels.gemv(bench.element(1, 576), matrix, hidden[:1, :48], residual=hidden[:1, :48])
    kernels.matmul(bench.element(2, 576), matrix, bench.unset(2, 24), gate="silu")
    kernels.matmul(bench.element(2, 576), matrix, bench.unset(1, 2, 48, dtype=torch.float32))
    floats, ints = bench.floats(2), bench.ints([1, 2])
    sampling = SamplingTable(floats, ints, floats, floats, ints.long(), ints)
    scratch = SamplingScratch.of(2, 99, bench.device)
    kernels.sample(bench.floats(2, 99), rows, sampling, scratch, ints, ints)
    assert compiled == [
        "embed", "rotations", "add_norm", "gated", "gemv", "gemv", "matmul", "matmul",
        "find_best", "find_cutoff", "draw",
    ]  # fmt: skip


@pytest.mark.parametrize(("case", "splits"), [(Case(head_dim=64), 16), (Case(head_dim=128, heads=4), 1)])
def test_attention_of_drafts_compiles(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, case: Case, splits: int
) -> None:
    sessions = Sessions(_bench(), case, splits=splits)
    sessions.draft([sessions.block(0, 8)])
    monkeypatch.setattr(triton_attention, "READ_TOGETHER", 1)
    sessions.draft([sessions.block(0, 8)])
    assert compiled == ["decode_attention", "draft_attention"]


def test_what_a_drafter_needs_compiles(compiled: list[str]) -> None:
    bench = _bench()
    kernels, rows, ints = bench.kernels, bench.rows([0, 1], [3, 4], [0, 0]), bench.ints([1, 2])
    state, norm, matrix = bench.floats(2, 576), bench.floats(576), bench.element(48, 576)
    kernels.gemv(state, matrix, bench.unset(2, 24), norm=norm, gate="silu")
    copy = bench.unset(2, 1152)[:, 576:624]
    kernels.gemv(bench.element(2, 576), matrix, state[:, :48], residual=state[:, :48], copy=copy)
    kernels.gemv(bench.element(1, 576), matrix, state[:1, :48], residual=state[:1, :48], copy=copy[:1])
    drafts, anchors = kernels.drafts, bench.floats(2, 576)
    table, out = bench.element(9, 576), bench.unset(2, 1152)
    drafts.input(table, ints, ints, rows, anchors, state, norm, norm, 1e-6, out)
    drafts.take_columns(state, bench.unset(2, 1152)[:, 576:])
    drafts.keep_anchors(state, ints, ints, anchors)
    runs = torch.zeros(2, 3, dtype=torch.int32)
    drafts.judge(DraftTable(*[bench.ints([0] * 4)] * 4), ints, ints, state, anchors, runs)
    floats = bench.floats(2)
    sampling = SamplingTable(floats, ints, floats, floats, ints.long(), ints)
    drafts.choose(bench.floats(2, 99), bench.ints([*range(99)]), rows, sampling, ints, ints)
    assert compiled == [
        "few_rows", "few_rows", "gemv", "draft_input", "take_columns", "keep_anchors", "judge_drafts",
        "choose_guess",
    ]  # fmt: skip

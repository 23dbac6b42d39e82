"""The part `kernels` of `bench gpu`: every operation by itself, beside what it must move."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kakeya.bench.gpu import kernels as gpu_kernels
from kakeya.bench.gpu.kernels import Timing, measured_kernels
from kakeya.bench.gpu.operations import Operation, Operations
from kakeya.bench.gpu.plan import FULL, LARGE, QUICK, SMALL
from kakeya.bench.gpu.results import GREEDY, SEEDED, Absence, Machine, Part
from kakeya.bench.gpu.shapes import SHAPES, TINY_LLAMA, TINY_QWEN3
from kakeya.kernels.gpu import AttentionLayer, GpuKernels, PromptTable, RowTable, load_gpu_kernels
from kakeya.kernels.gpu.torch_kernels import TorchKernels
from kakeya.types import KernelChoice

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MACHINE = Machine(copy_bytes_per_second=4e12, product_flops_per_second=8e14)
TORCH = load_gpu_kernels(CPU, KernelChoice.TORCH)
NAMES = {name for name in vars(GpuKernels) if not name.startswith("_")} - {
    "supports_head_dim",
    "scratch",
    "product_parts",
}


def operations(rows: tuple[int, ...] = (1, 4)) -> list[Operation]:
    return list(Operations(TINY_QWEN3, QUICK, CPU).all(rows))


def test_bytes_and_operations_are_those_counted_by_hand() -> None:
    large = Operations(SHAPES[LARGE], FULL, CPU)
    assert FULL.past_the_wrap == 1028
    for operation, moved in (
        (large.embed(256), 256 * 4096 * (2 + 4)),
        (large.rotations(256), 256 * 4 * 64 * 4),
        (large.add_norm(256), 256 * 4096 * (4 + 2 + 4 + 2)),
        (large.norm_rows(256), 256 * 2 * 4096 * 2),
        (large.gated(256), 256 * (24_576 + 12_288) * 2),
        (large.one_row_product("any", 6144, 4096), 50_331_648),
        (large.product("any", 256, 1536, 576, "silu", None), (3072 * 576 + 256 * (576 + 1536)) * 2),
        # 1,027 tokens read, one stored, which the matmul has made; queries and results; rotations.
        (large.decode_attention(1), (1027 + 1 + 1) * 4096 + 2 * 8192 + 1024),
        (large.decode_attention(256), 256 * ((1027 + 1 + 1) * 4096 + 2 * 8192 + 1024)),
        (large.store_rows(256), 256 * (2 * 4096 + 512)),
        (large.prompt_attention(2048), 2 * 1028 * 4096 + 2048 * (4096 + 2 * 8192 + 1024)),
        (large.choose(256, GREEDY, 0.0, 1.0), 155_582_464),
    ):
        assert operation.moved_bytes == moved, operation.name
    assert large.prompt_attention(2048).flops == 34_493_956_096


def test_a_step_past_the_wrap_moves_little_but_what_its_floor_counts() -> None:
    shape = SHAPES[SMALL]
    attention = Operations(shape, FULL, CPU).decode_attention(256).moved_bytes
    whole = shape.model.num_layers * attention
    assert whole == pytest.approx(256 * 1028 * shape.kv_bytes_per_token, rel=0.01)


def test_every_operation_is_among_them_at_the_sizes_of_the_plan() -> None:
    found = list(Operations(SHAPES[LARGE], FULL, CPU).all(FULL.large_rows))
    assert {each.name for each in found} == NAMES - {"product"}  # its products are a library's
    sizes = [(each.name, each.size) for each in found]
    rowwise = ("embed", "rotations", "add_norm", "norm_rows", "gated")
    assert sizes[:5] == [(name, "256 rows") for name in rowwise]
    assert [size for name, size in sizes if name == "one_row_product"] == [
        "qkv, 6,144 × 4,096",
        "output, 4,096 × 4,096",
        "gate and up, 24,576 × 4,096",
        "down, 4,096 × 12,288",
        "head, 151,936 × 4,096",
    ]
    assert sizes[10:] == [
        ("decode_attention", "1 row, 16 splits"),
        ("decode_attention", "64 rows, 1 split"),
        ("decode_attention", "256 rows, 1 split"),
        ("store_rows", "256 rows"),
        ("prompt_attention", "2,048 rows"),
        ("choose", f"256 rows, {GREEDY}"),
        ("choose", f"256 rows, {SEEDED}"),
    ]
    assert [each.name for each in found if each.flops is not None] == ["prompt_attention"]


def test_small_weights_have_products_of_our_own() -> None:
    found = list(Operations(SHAPES[SMALL], FULL, CPU).all(FULL.small_rows))
    assert {each.name for each in found} == NAMES
    assert [each.size for each in found if each.name == "product"] == [
        "qkv, 256 rows, 960 × 576",
        "output, 256 rows, 576 × 576",
        "gate and up, 256 rows, 3,072 × 576",
        "down, 256 rows, 576 × 1,536",
    ]


class Recorder:
    """Torch's kernels, and what each call got."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(TORCH, name)
        if name == "scratch":
            return method

        def recorded(*args: Any, **named: Any) -> None:
            self.calls.append((name, [*args, *named.values()]))
            method(*args, **named)

        return recorded


def places(args: list[Any]) -> set[object]:
    """Where the data of a call lies."""
    tensors = {each.data_ptr() for each in args if isinstance(each, torch.Tensor)}
    return tensors | {each.index for each in args if isinstance(each, AttentionLayer)}


@pytest.mark.parametrize("at", range(len(operations())))
def test_each_call_is_the_named_one_on_data_of_its_own(at: int) -> None:
    operation, recorder = operations()[at], Recorder()
    call = operation.make(recorder, 2)  # type: ignore[arg-type]
    call(0)
    call(1)
    assert [name for name, _ in recorder.calls] == [operation.name] * 2
    first, second = (args for _, args in recorder.calls)
    assert places(first) != places(second)
    for table in (each for each in first if isinstance(each, RowTable)):
        assert table.positions.min() >= QUICK.cache.slots
        assert table.slabs.min() == 0
    for prompt in (each for each in first if isinstance(each, PromptTable)):
        assert prompt.segments.tolist() == [[0, QUICK.position, 0, QUICK.prompt_rows, QUICK.cache.sink]]
        assert prompt.tiles.tolist() == [[0, 0]]


def test_rows_of_a_session_displace_nothing_that_the_first_of_them_sees() -> None:
    plan, recorder = replace(QUICK, sessions=20), Recorder()
    [store] = [each for each in Operations(TINY_LLAMA, plan, CPU).all(()) if each.name == "store_rows"]
    store.make(recorder, 1)(0)  # type: ignore[arg-type]
    [(_, [_, layer, _, table])] = recorder.calls
    assert table.slabs.tolist() == [0] * 9 + [1] * 9 + [2] * 2
    assert table.positions.tolist() == [*range(100, 109), *range(100, 109), 100, 101]
    assert len(layer.pool) == 3


def test_all_are_measured_and_held_to_the_rate_they_depend_on() -> None:
    rows, absent = measured_kernels(TINY_QWEN3, (1, 4), QUICK, CPU, MACHINE)
    assert absent == []
    for row, operation in zip(rows, operations(), strict=True):
        assert (row.shape, row.operation, row.size) == ("tiny-qwen3", operation.name, operation.size)
        [(name, timing)] = row.timings.items()
        assert (name, timing.captured) == ("torch", False)
        assert len(timing.seconds.samples) == QUICK.repeats
        flops = operation.flops
        floor = operation.moved_bytes / 4e12 if flops is None else flops / 8e14
        assert row.floor_seconds == pytest.approx(floor)
        assert timing.floor_share == pytest.approx(floor / (timing.seconds.median or 0))


def test_an_operation_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such launch")

    monkeypatch.setattr(TorchKernels, "gated", broken)
    monkeypatch.setattr(TorchKernels, "store_rows", broken)
    # As many rows as fill a tile: products of fewer are left to a library.
    rows, absent = measured_kernels(TINY_LLAMA, (1,), replace(QUICK, sessions=64), CPU, MACHINE)
    assert {row.operation for row in rows} == NAMES - {"gated", "store_rows"}
    failed = ("gated, 64 rows", "one_row_product, gate and up, 128 × 48", "store_rows, 64 rows")
    assert absent == [
        Absence(Part.KERNELS, f"tiny-llama, {work}, torch", "ValueError: no such launch") for work in failed
    ]
    assert "gated failed with the torch kernels" in caplog.text


def test_a_kernel_that_takes_too_long_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(gpu_kernels, "_seconds_alone", lambda *_: 0.7)
    outcome = gpu_kernels._timed(calls.append, 4, replace(QUICK, kernel_call_seconds=0.5), CPU)
    assert outcome == "one call takes 0.7 s, too long to repeat"
    assert calls == [0]


@pytest.mark.parametrize(
    ("seconds", "calls", "repeats"),
    [(1e-5, 64, 15), (0.001, 33, 15), (0.03, 1, 15), (0.1, 1, 5), (0.5, 1, 3), (2.0, 1, 3)],
)
def test_slow_kernels_are_called_less_often(seconds: float, calls: int, repeats: int) -> None:
    assert gpu_kernels._affordable(seconds, 64, 15) == (calls, repeats)


def test_small_operations_are_called_often_enough_to_leave_a_devices_cache() -> None:
    asked: list[int] = []

    def make(kernels: GpuKernels, calls: int) -> Any:
        asked.append(calls)
        return lambda at: None

    for moved in (1, 8 * 2**20, 10**9):
        gpu_kernels._tried(Operation("any", "any", moved, make), TORCH, FULL, CPU)
    assert asked == [64, 32, 4]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A device that captures and replays, as far as timing needs it; `refuses`: no wait is allowed."""
    seen: dict[str, Any] = {"refuses": False, "captured": 0, "timed": 0}

    def do_bench(launch: Any, rep: float, return_mode: str) -> list[float]:
        seen["captured"] += 1
        launch()
        return [8.0] * 10

    def timed(device: torch.device, work: Any, repeats: int) -> list[float]:
        seen["timed"] += 1
        work()
        return [0.008] * repeats

    monkeypatch.setattr("triton.testing.do_bench_cudagraph", do_bench)
    monkeypatch.setattr(gpu_kernels, "timed", timed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: seen.update(refuses=mode == "error"))
    monkeypatch.setattr(gpu_kernels, "_seconds_alone", lambda *_: 0.001)
    return seen


def test_all_buffers_are_replayed_in_one_graph(cuda: dict[str, Any]) -> None:
    calls: list[int] = []
    timing = gpu_kernels._timed(calls.append, 2, QUICK, CUDA)
    assert timing == Timing([0.004] * 10, captured=True), "of one call, not of the graph"
    assert calls == [0, 0, 1, 0, 1], "compiled, tried for waits, captured"
    assert cuda == {"refuses": False, "captured": 1, "timed": 0}


def test_what_waits_for_the_device_is_timed_without_a_graph(cuda: dict[str, Any]) -> None:
    def call(at: int) -> None:
        if cuda["refuses"]:
            raise RuntimeError("called a synchronizing CUDA operation")

    timing = gpu_kernels._timed(call, 1, QUICK, CUDA)
    assert timing == Timing([0.008] * QUICK.repeats, captured=False)
    assert cuda == {"refuses": False, "captured": 0, "timed": 1}

"""The part `kernels` of `bench gpu`: every operation by itself, beside what it must move."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from kakeya.bench import gpu_kernels
from kakeya.bench.gpu_kernels import Timing, measured_kernels
from kakeya.bench.gpu_operations import Operation, Operations
from kakeya.bench.gpu_page import gpu_sections, kernel_table
from kakeya.bench.gpu_plan import FULL, QUICK
from kakeya.bench.gpu_results import (
    GREEDY,
    LARGE,
    SEEDED,
    SMALL,
    Part,
    absence,
    empty_results,
    gpu_gates,
    kernel_row,
)
from kakeya.bench.gpu_shapes import SHAPES, TINY_LLAMA, TINY_QWEN3
from kakeya.bench.gpu_traffic import KernelTraffic
from kakeya.kernels.gpu import AttentionLayer, GpuKernels, PromptTable, RowTable, load_gpu_kernels
from kakeya.kernels.gpu.torch_kernels import TorchKernels
from kakeya.types import KernelChoice

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
RATES = {"copy_bytes_per_second": 4e12, "product_flops_per_second": 8e14}
TORCH = load_gpu_kernels(CPU, KernelChoice.TORCH)
NAMES = {name for name in vars(GpuKernels) if not name.startswith("_")} - {
    "supports_head_dim",
    "scratch",
    "product_parts",
}


def operations(rows: tuple[int, ...] = (1, 4)) -> list[Operation]:
    return list(Operations(TINY_QWEN3, QUICK, CPU).all(rows))


def test_bytes_and_operations_are_those_counted_by_hand() -> None:
    traffic = KernelTraffic(SHAPES[LARGE], capacity=1028)
    assert traffic.embed(256) == 256 * 4096 * (2 + 4)
    assert traffic.rotations(256) == 256 * 4 * 64 * 4
    assert traffic.add_norm(256) == 256 * 4096 * (4 + 2 + 4 + 2)
    assert traffic.norm_rows(256) == 256 * 2 * 4096 * 2
    assert traffic.gated(256) == 256 * (24_576 + 12_288) * 2
    assert traffic.one_row_product(6144, 4096) == 50_331_648
    assert traffic.product(256, 1536, 576, sides=2) == (3072 * 576 + 256 * (576 + 1536)) * 2
    # 1,027 tokens read, one stored, which the product has made; queries and results; rotations.
    assert traffic.decode_attention(1) == (1027 + 1 + 1) * 4096 + 2 * 8192 + 1024
    assert traffic.decode_attention(256) == 256 * traffic.decode_attention(1)
    assert traffic.store_rows(256) == 256 * (2 * 4096 + 512)
    assert traffic.prompt_attention(2048) == 2 * 1028 * 4096 + 2048 * (4096 + 2 * 8192 + 1024)
    assert traffic.prompt_attention_flops(2048) == 34_493_956_096
    assert traffic.choose(256) == 155_582_464


def test_a_step_past_the_wrap_moves_little_but_what_its_floor_counts() -> None:
    shape = SHAPES[SMALL]
    attention = shape.model.num_layers * KernelTraffic(shape, 1028).decode_attention(256)
    assert attention == pytest.approx(256 * 1028 * shape.kv_bytes_per_token, rel=0.01)


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
    found = measured_kernels(TINY_QWEN3, (1, 4), QUICK, CPU, RATES)
    assert found["absent"] == []
    rows = found["kernels"]
    assert [(row["operation"], row["size"]) for row in rows] == [
        (each.name, each.size) for each in operations()
    ]
    for row, operation in zip(rows, operations(), strict=True):
        [(name, timing)] = row["timings"].items()
        assert (row["shape"], name, timing["captured"]) == ("tiny-qwen3", "torch", False)
        assert len(timing["seconds"]["samples"]) == QUICK.repeats
        flops = operation.flops
        floor = operation.moved_bytes / 4e12 if flops is None else flops / 8e14
        assert row["floor_seconds"] == pytest.approx(floor)
        assert timing["floor_share"] == pytest.approx(floor / timing["seconds"]["median"])


def test_an_operation_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such launch")

    monkeypatch.setattr(TorchKernels, "gated", broken)
    monkeypatch.setattr(TorchKernels, "store_rows", broken)
    # As many rows as fill a tile: products of fewer are left to a library.
    found = measured_kernels(TINY_LLAMA, (1,), replace(QUICK, sessions=64), CPU, RATES)
    assert {row["operation"] for row in found["kernels"]} == NAMES - {"gated", "store_rows"}
    assert found["absent"] == [
        absence(Part.KERNELS, f"tiny-llama, {work}, torch", "ValueError: no such launch")
        for work in (
            "gated, 64 rows",
            "one_row_product, gate and up, 128 × 48",
            "store_rows, 64 rows",
        )
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


class FakeCuda:
    """Streams, graphs and the watch over waits, as far as capturing needs them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.refuses_waits = False
        for name in ("Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, FakeStream)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self._within("aside"))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self._graph)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", self._watch)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
        monkeypatch.setattr(gpu_kernels, "timed", self._timed)

    def replay(self) -> None:
        self.done.append("replay")

    def _graph(self, graph: object, *, stream: object, capture_error_mode: str) -> Any:
        assert graph is self
        assert capture_error_mode == "thread_local"
        return self._within("capture")

    @contextmanager
    def _within(self, what: str) -> Iterator[None]:
        self.done.append(what)
        yield
        self.done.append(f"end of {what}")

    def _watch(self, mode: str) -> None:
        self.refuses_waits = mode == "error"

    def _timed(self, device: torch.device, work: Any, repeats: int) -> list[float]:
        work()
        return [0.008] * repeats


class FakeStream:
    def wait_stream(self, other: "FakeStream") -> None:
        pass


def test_calls_are_run_aside_captured_and_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(gpu_kernels, "_seconds_alone", lambda *_: 0.001)
    timing = gpu_kernels._timed(lambda at: cuda.done.append(f"call {at}"), 2, QUICK, CUDA)
    assert timing == Timing([0.004] * 3, captured=True), "of one call, not of the graph"
    calls = ["call 0", "call 1"]
    assert cuda.done == [
        "call 0", "aside", *calls, "end of aside", "capture", *calls, "end of capture", "replay",
    ]  # fmt: skip
    assert not cuda.refuses_waits


def test_what_waits_for_the_device_is_timed_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)

    def call(at: int) -> None:
        if cuda.refuses_waits:
            raise RuntimeError("called a synchronizing CUDA operation")

    timing = gpu_kernels._timed(call, 1, QUICK, CUDA)
    assert isinstance(timing, Timing)
    assert not timing.captured
    assert "capture" not in cuda.done
    assert not cuda.refuses_waits


def row(**changes: Any) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "moved_bytes": 4_232_192,
        "flops": None,
        "floor_seconds": 1e-6,
        "seconds": {"triton": [1.25e-6, 9e-6, 1e-6], "torch": [1e-3]},
        "captured": {"triton"},
    }
    return kernel_row(LARGE, "decode_attention", "1 row, 16 splits", **(asked | changes))


def test_the_table_shows_both_kernels_beside_the_floor() -> None:
    alone = row(seconds={"torch": [2e-3]}, captured={"torch"}, flops=34_493_956_096)
    name = (LARGE, "decode_attention", "1 row, 16 splits")
    assert kernel_table([row(), alone]).rows == [
        (*name, "4.23", "–", "1.0", "1.2", "0.800", "1,000.0 (no graph)", "0.001"),
        (*name, "4.23", "34.49", "1.0", "–", "–", "2,000.0", "0.001"),
    ]


def test_kernels_are_shown_and_not_judged() -> None:
    results = empty_results() | {"kernels": [row()]}
    assert [section.table.title for section in gpu_sections(results)] == ["Kernels by themselves"]
    assert gpu_gates(results) == gpu_gates(empty_results())
    del results["kernels"]  # as in a report of an older version
    assert gpu_sections(results) == []
    assert gpu_gates(results) == gpu_gates(empty_results())

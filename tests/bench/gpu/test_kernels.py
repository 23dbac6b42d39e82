"""The part `kernels` of `bench gpu`: every operation by itself, beside what it must move."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kakeya.bench.gpu import kernels as gpu_kernels
from kakeya.bench.gpu.kernels import kernel_rows
from kakeya.bench.gpu.operations import Operation, Operations
from kakeya.bench.gpu.plan import FULL, LARGE, QUICK, SMALL
from kakeya.bench.gpu.results import GREEDY, SEEDED, Absence, Kernel, Machine, Part
from kakeya.bench.gpu.shapes import SHAPES, TINY_LLAMA, TINY_QWEN3
from kakeya.kernels.gpu import AttentionLayer, GpuKernels, PrefillTable, RowTable, load_gpu_kernels
from kakeya.kernels.gpu.torch_kernels import TorchKernels
from kakeya.types import KernelChoice

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MACHINE = Machine(copy_bytes_per_second=4e12, product_flops_per_second=8e14)
TORCH = load_gpu_kernels(CPU, KernelChoice.TORCH)
NAMES = {name for name in vars(GpuKernels) if not name.startswith("_")}
NAMES -= {"supports_head_dim", "scratch", "k_splits", "fuses_rows"}
# As many rows as fill a tile: matmuls of fewer are left to cuBLAS.
MANY = replace(QUICK, sessions=64)
TINY = list(Operations(TINY_QWEN3, MANY, CPU).all((1, 4)))


def test_operations_sizes_and_bytes_are_those_counted_by_hand() -> None:
    found = list(Operations(SHAPES[LARGE], FULL, CPU).all(FULL.large_rows))
    # 1,027 tokens read, one stored, which the matmul has made; queries and results; rotations.
    attended = (1027 + 1 + 1) * 4096 + 2 * 8192 + 1024
    assert [(each.name, each.size, each.moved_bytes) for each in found] == [
        ("embed", "256 rows", 256 * 4096 * (2 + 4)),
        ("rotations", "256 rows", 256 * 4 * 64 * 4),
        ("add_norm", "256 rows", 256 * 4096 * (4 + 2 + 4 + 2)),
        ("norm_rows", "256 rows", 256 * 2 * 4096 * 2),
        ("gated", "256 rows", 256 * (24_576 + 12_288) * 2),
        ("gemv", "qkv, 6,144 × 4,096", 50_331_648),
        ("gemv", "output, 4,096 × 4,096", 33_554_432),
        ("gemv", "gate and up, 24,576 × 4,096", 201_326_592),
        ("gemv", "down, 4,096 × 12,288", 100_663_296),
        ("gemv", "head, 151,936 × 4,096", 1_244_659_712),
        ("decode_attention", "1 row, 16 splits", attended),
        ("decode_attention", "64 rows, 1 split", 64 * attended),
        ("decode_attention", "256 rows, 1 split", 256 * attended),
        (
            "draft_attention",
            "64 sessions, 8 rows each",
            64 * ((1027 + 8) * 4096 + 8 * (4096 + 2 * 8192 + 1024)),
        ),
        ("store_rows", "256 rows", 256 * (2 * 4096 + 512)),
        ("prefill_attention", "2,048 rows", 2 * 1028 * 4096 + 2048 * (4096 + 2 * 8192 + 1024)),
        ("sample", f"256 rows, {GREEDY}", 155_582_464),
        ("sample", f"256 rows, {SEEDED}", 155_582_464),
    ]
    assert [each.flops for each in found if each.flops is not None] == [34_493_956_096]
    assert {each.name for each in found} == NAMES - {"matmul"}, "its matmuls are left to cuBLAS"


def test_small_weights_have_matmuls_of_our_own() -> None:
    found = list(Operations(SHAPES[SMALL], FULL, CPU).all(FULL.small_rows))
    assert {each.name for each in found} == NAMES
    assert [(each.size, each.moved_bytes) for each in found if each.name == "matmul"] == [
        ("qkv, 256 rows, 960 × 576", (960 * 576 + 256 * (576 + 960)) * 2),
        ("output, 256 rows, 576 × 576", (576 * 576 + 256 * (576 + 576)) * 2),
        ("gate and up, 256 rows, 3,072 × 576", (3072 * 576 + 256 * (576 + 1536)) * 2),
        ("down, 256 rows, 576 × 1,536", (576 * 1536 + 256 * (1536 + 576)) * 2),
    ]
    [attention] = [each for each in found if each.name == "decode_attention" and each.size.startswith("256")]
    whole = SHAPES[SMALL].model.num_layers * attention.moved_bytes
    assert whole == pytest.approx(256 * 1028 * SHAPES[SMALL].kv_bytes_per_token, rel=0.01)


class Recorder:
    """Torch's kernels, and what each call got."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def recorded(*args: Any, **named: Any) -> None:
            self.calls.append((name, [*args, *named.values()]))
            getattr(TORCH, name)(*args, **named)

        return getattr(TORCH, name) if name == "scratch" else recorded


def places(args: list[Any]) -> set[object]:
    """Where the data of a call lies."""
    tensors = {each.data_ptr() for each in args if isinstance(each, torch.Tensor)}
    return tensors | {each.index for each in args if isinstance(each, AttentionLayer)}


@pytest.mark.parametrize("operation", TINY, ids=lambda each: f"{each.name}, {each.size}")
def test_each_call_is_the_named_one_on_data_of_its_own(operation: Operation) -> None:
    recorder: Any = Recorder()
    call = operation.make(recorder, 2)
    call(0)
    call(1)
    [(name, first), (again, second)] = recorder.calls
    assert name == again == operation.name
    assert places(first) != places(second)
    for table in (each for each in first if isinstance(each, RowTable)):
        assert table.positions.min() >= QUICK.cache.slots
        assert table.slabs.min() == 0
        if operation.name == "store_rows":  # a session's rows overwrite nothing that the first of them sees
            assert table.slabs.tolist() == [row // 9 for row in range(64)]
            assert table.positions.tolist() == [100 + row % 9 for row in range(64)]
            assert len(first[1].pool) == 8
    for prompt in (each for each in first if isinstance(each, PrefillTable)):
        assert prompt.segments.tolist() == [[0, QUICK.position, 0, QUICK.prompt_rows, QUICK.cache.sink]]
        assert prompt.tiles.tolist() == [[0, 0]]


def test_operations_are_measured_and_one_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no such launch")

    monkeypatch.setattr(TorchKernels, "norm_rows", broken)
    monkeypatch.setattr(TorchKernels, "store_rows", broken)
    rows = list(kernel_rows(TINY_LLAMA, (1, 4), MANY, CPU, MACHINE))
    for row, operation in zip(rows, Operations(TINY_LLAMA, MANY, CPU).all((1, 4)), strict=True):
        name, size, flops = operation.name, operation.size, operation.flops
        if name in ("norm_rows", "store_rows"):
            assert row == Absence(
                Part.KERNELS, f"tiny-llama, {name}, {size}, torch", "ValueError: no such launch"
            )
            continue
        assert isinstance(row, Kernel)
        assert (row.shape, row.operation, row.size, row.flops) == ("tiny-llama", name, size, flops)
        timing = row.timings["torch"]
        assert (timing.captured, len(timing.seconds.samples)) == (False, QUICK.repeats)
        floor = operation.moved_bytes / 4e12 if flops is None else flops / 8e14
        assert row.floor_seconds == pytest.approx(floor)
        assert timing.floor_share == pytest.approx(floor / (timing.seconds.median or 0))
    assert {row.operation for row in rows if isinstance(row, Kernel)} == NAMES - {"norm_rows", "store_rows"}
    assert "norm_rows failed with the torch kernels" in caplog.text


@pytest.mark.parametrize(
    ("moved", "alone", "made", "repeated"),
    [
        (1, 1e-5, 64, 64),
        (8 * 2**20, 1e-5, 32, 32),  # enough to leave a device's cache
        (10**9, 1e-5, 4, 4),
        (1, 0.001, 64, 33),  # slow kernels are called less often
        (1, 0.1, 64, 1),
        (1, 0.7, 64, None),  # and not repeated
    ],
)
def test_calls_are_replayed_as_one_graph(
    moved: int, alone: float, made: int, repeated: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def make(kernels: GpuKernels, count: int) -> Any:
        assert count == made
        return calls.append

    def replay(launch: Any, rep: float, return_mode: str) -> list[float]:
        calls.clear()
        launch()
        return [8.0] * 10

    monkeypatch.setattr("triton.testing.do_bench_cudagraph", replay)
    monkeypatch.setattr(gpu_kernels, "_seconds_alone", lambda *_: alone)
    operation = Operation("any", "any", moved, make)
    if repeated is None:
        with pytest.raises(TimeoutError, match=r"one call takes 0\.7 s, too long to repeat"):
            gpu_kernels._seconds(operation, TORCH, FULL, CUDA)
    else:
        seconds = gpu_kernels._seconds(operation, TORCH, FULL, CUDA)
        assert seconds == pytest.approx([0.008 / repeated] * 10), "of one call, not of the graph"
        assert calls == list(range(repeated))

"""What the door promises about loading, threads and bad arguments."""

import sys
import threading
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from kakeya.errors import ConfigError
from kakeya.kernels import Kernels, PackedMatrix, PackedPart, load
from kakeya.types import KernelChoice


def test_torch_means_no_kernels() -> None:
    assert load(KernelChoice.TORCH) is None


def test_auto_finds_what_was_built(best: Kernels) -> None:
    found = load(KernelChoice.AUTO)
    assert found is not None
    assert found.isa == best.isa
    assert found.isa in ("avx512-vnni", "avx2", "neon-dotprod", "generic")


def test_a_library_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kakeya.kernels._native", None)
    assert load(KernelChoice.AUTO) is None
    with pytest.raises(ConfigError, match="native kernels are not available .*kernels=torch"):
        load(KernelChoice.NATIVE)


def test_head_sizes(best: Kernels) -> None:
    assert [d for d in (0, 8, 16, 24, 64, 80, 1024, 1040) if best.supports_head_dim(d)] == [16, 64, 80, 1024]


def test_unknown_instruction_set_and_thread_count(best: Kernels, native: ModuleType) -> None:
    with pytest.raises(ValueError, match="cannot run the kernels for mmx"):
        native.set_isa("mmx")
    with pytest.raises(ValueError, match="threads must be at least 1, got 0"):
        best.set_threads(0)
    assert best.threads == 2


def test_two_threads_may_call_at_once(best: Kernels) -> None:
    """The pool serves one caller; another computes alone, and both get the right bits."""
    q = torch.randint(0, 16, (400, 320), dtype=torch.uint8)
    part = best.pack(4, q, torch.rand(400, 10).half(), torch.rand(400, 10).half())
    matrix = best.matrix([part], 320)
    x = torch.randn(16, 320)
    expected = best.linear(x, matrix)
    right: list[bool] = []

    def work() -> None:
        right.extend(torch.equal(best.linear(x, matrix), expected) for _ in range(60))

    callers = [threading.Thread(target=work) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert right == [True] * 180


def test_workers_that_fell_asleep_wake_up(best: Kernels) -> None:
    x = torch.randn(300, 512)
    expected = best.rms_norm(x, torch.ones(512), 1e-5)
    for _ in range(3):
        threading.Event().wait(0.005)  # far longer than a worker spins
        assert torch.equal(best.rms_norm(x, torch.ones(512), 1e-5), expected)


Q, HALF = torch.zeros(16, 64, dtype=torch.uint8), torch.zeros(16, 2).half()
BLOCKS, IDS = torch.zeros(4, 144, dtype=torch.uint8), torch.tensor([0])


def matrix_of(kernels: Kernels) -> PackedMatrix:
    return kernels.matrix([kernels.pack(4, Q, HALF, HALF)], 64)


def part_of(kernels: Kernels) -> PackedPart:
    return kernels.pack_blocks("Q4_K", BLOCKS, 256)


BAD_PACKS: dict[str, tuple[Callable[[Kernels], object], str]] = {
    "bits": (lambda k: k.pack(5, Q, HALF, HALF), "bits must be 4 or 8, got 5"),  # type: ignore[arg-type]
    "dtype": (lambda k: k.pack(4, Q.int(), HALF, HALF), "q must be uint8 .*got int32"),
    "columns": (lambda k: k.pack(4, Q[:, :40], HALF, HALF), "multiple of 32"),
    "scale": (lambda k: k.pack(4, Q, HALF[:, :1], HALF), r"scale must be float16 \[16, 2\]"),
    "minimum": (lambda k: k.pack(4, Q, HALF, HALF.float()), "minimum must be float16 .*got float32"),
    "format": (lambda k: k.pack_blocks("Q1_K", BLOCKS, 256), "format must be one of Q4_1, .*got Q1_K"),
    "blocks": (
        lambda k: k.pack_blocks("Q4_K", BLOCKS, 512),
        r"512 columns of Q4_K must be .*288\].*\[4, 144\]",
    ),
    "part of a block": (lambda k: k.pack_blocks("Q4_K", BLOCKS, 100), "100 columns of Q4_K must be"),
    "out": (
        lambda k: k.pack_blocks("Q4_K", BLOCKS, 256, Q.flatten()),
        r"out must be .*\[2368\], got uint8 \[1024\]",
    ),
    "parts": (lambda k: k.matrix([k.pack(4, Q, HALF, HALF)], 96), "16 rows and 640 bytes has not 96 columns"),
    "rows": (lambda k: k.dequantize_rows(part_of(k), 512, IDS), "4 rows and 2368 bytes has not 512 columns"),
    "ids": (lambda k: k.dequantize_rows(part_of(k), 256, IDS.int()), "ids must be contiguous int64"),
    "id": (lambda k: k.dequantize_rows(part_of(k), 256, IDS + 4), "ids must be from 0 to 3, got 4 to 4"),
}
X = torch.zeros(3, 64)
BAD_ROWS: dict[str, tuple[Callable[[Kernels], object], str]] = {
    "x shape": (lambda k: k.linear(X[:, :32], matrix_of(k)), r"x must be float32 \[rows, 64\]"),
    "x dtype": (lambda k: k.linear(X.double(), matrix_of(k)), "got float64"),
    "x strides": (lambda k: k.linear(torch.zeros(64, 3).T, matrix_of(k)), "contiguous rows"),
    "bias": (lambda k: k.linear(X, matrix_of(k), torch.zeros(15)), r"bias must be .*\[16\]"),
    "residual": (lambda k: k.linear(X, matrix_of(k), None, X), r"residual must be .*\[3, 16\]"),
    "out of a product": (
        lambda k: k.linear(X, matrix_of(k), out=torch.zeros(2, 16)),
        r"out must be .*\[3, 16\], got float32 \[2, 16\]",
    ),
    "norm weight": (lambda k: k.rms_norm(X, torch.zeros(32), 1e-5), r"x must be float32 \[rows, 32\]"),
    "activation": (lambda k: k.gated(X, "relu"), "one of silu, gelu_tanh, got 'relu'"),
    "odd width": (lambda k: k.gated(torch.zeros(1, 3), "silu"), "even number of columns, got 3"),
}


@pytest.mark.parametrize("name", [*BAD_PACKS, *BAD_ROWS])
def test_bad_tensors_are_named(best: Kernels, name: str) -> None:
    call, message = (BAD_PACKS | BAD_ROWS)[name]
    with pytest.raises(ValueError, match=message):
        call(best)


def attend_with(kernels: Kernels, **changes: object) -> torch.Tensor:
    """A sound call of three rows, two heads over one, with some arguments replaced."""
    arguments: dict[str, object] = {
        "q": torch.zeros(3, 2, 16),
        "k": torch.zeros(3, 1, 16),
        "v": torch.zeros(3, 1, 16),
        "cos": torch.ones(3, 8),
        "sin": torch.zeros(3, 8),
        "sink_cos": torch.ones(3, 8),
        "sink_sin": torch.zeros(3, 8),
        "pool": torch.zeros(2, 1, 2, 1, 10, 16),
        "layer": 0,
        "segments": torch.tensor([[0, 0, 2, 0], [1, 2, 1, 5]]),
        "sinks": torch.tensor([2, 0]),
        "capacity": 8,
        "scale": 0.25,
    }
    return kernels.attend(**(arguments | changes))  # type: ignore[arg-type]


BAD_ATTENTION: dict[str, tuple[dict[str, object], str]] = {
    "head size": ({"q": torch.zeros(3, 2, 24)}, "head_dim must be a multiple of 16 up to 1024, got 24"),
    "rows": ({"k": torch.zeros(2, 1, 16), "v": torch.zeros(2, 1, 16)}, "q, k and v do not fit"),
    "heads": (
        {"q": torch.zeros(3, 3, 16), "k": torch.zeros(3, 2, 16), "v": torch.zeros(3, 2, 16)},
        "do not fit",
    ),
    "dtype": ({"v": torch.zeros(3, 1, 16).double()}, "must be float32 with contiguous heads, got float64"),
    "strides": ({"q": torch.zeros(3, 16, 2).transpose(1, 2)}, "contiguous heads"),
    "angles": ({"sin": torch.zeros(3, 7)}, r"cos and sin must be contiguous float32 \[3, 8\]"),
    "pool dtype": (
        {"pool": torch.zeros(2, 1, 2, 1, 10, 16).half()},
        "pool must be contiguous float32 or bfloat16",
    ),
    "pool heads": ({"pool": torch.zeros(2, 1, 2, 3, 10, 16)}, r"\[slabs, layers, 2, 1, 10, 16\]"),
    "layer": ({"layer": 1}, "layer 1 and capacity 8 do not fit"),
    "capacity": ({"capacity": 11}, "layer 0 and capacity 11 do not fit"),
    "segments": ({"segments": torch.zeros(3, 4, dtype=torch.int64)}, r"contiguous int64 \[n, 4\] and \[n\]"),
    "sinks dtype": ({"sinks": torch.zeros(2, dtype=torch.int32)}, r"contiguous int64 \[n, 4\] and \[n\]"),
    "segment strides": ({"segments": torch.zeros(4, 2, dtype=torch.int64).T}, r"contiguous int64"),
    "slab": ({"segments": torch.tensor([[0, 0, 2, 0], [2, 2, 1, 5]])}, "segment 1: no slab 2"),
    "gap": (
        {"segments": torch.tensor([[0, 0, 1, 0], [1, 2, 1, 5]])},
        "segment 1: segments must cover the rows",
    ),
    "too few": (
        {"segments": torch.tensor([[0, 0, 2, 0]]), "sinks": torch.tensor([2])},
        "must cover every row",
    ),
    "empty": ({"segments": torch.tensor([[0, 0, 3, 0], [1, 3, 0, 5]])}, "segment 1: segments must cover"),
    "start": (
        {"segments": torch.tensor([[0, 0, 2, -1], [1, 2, 1, 5]])},
        "segment 0: start position is negative",
    ),
    "no window": ({"sinks": torch.tensor([2, 8])}, "segment 1: sinks must leave a window"),
    "same slab": (
        {"segments": torch.tensor([[1, 0, 2, 0], [1, 2, 1, 5]])},
        "segment 1: slab 1 appears twice",
    ),
}


def test_the_sound_call_is_sound(best: Kernels) -> None:
    assert attend_with(best).shape == (3, 32)


@pytest.mark.parametrize("name", BAD_ATTENTION)
def test_bad_attention_is_named_and_writes_nothing(best: Kernels, name: str) -> None:
    changes, message = BAD_ATTENTION[name]
    pool = torch.full((2, 1, 2, 1, 10, 16), 7.0)
    with pytest.raises(ValueError, match=message):
        attend_with(best, **({"pool": pool} | changes))
    assert torch.equal(pool, torch.full_like(pool, 7.0))

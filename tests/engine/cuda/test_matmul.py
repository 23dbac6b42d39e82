"""Which matmuls cuBLAS does and which our kernels do, and that nobody can tell from the numbers."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kakeya.bench.gpu.shapes import TINY_LLAMA
from kakeya.engine.cuda import matmul as matmul_module
from kakeya.engine.cuda.matmul import Matmuls
from kakeya.engine.cuda.shapes import StepBuckets
from kakeya.engine.cuda.weights import Matrix
from kakeya.engine.cuda.workspace import Workspace, WorkspacePlan
from kakeya.kernels.gpu import MAX_MATMUL_ROWS, Activation
from kakeya.kernels.gpu.torch_kernels import TorchKernels
from support import tiny

ROWS = 5
MODEL = TINY_LLAMA.model


@dataclass
class Own(TorchKernels):
    """Torch's kernels, which take every matmul, with as many splits as allowed and at most 2."""

    made: list[tuple[int, ...]] = field(default_factory=list)

    def k_splits(self, rows: int, weight: Tensor, outputs: int, most: int = 1) -> int:
        return min(most, 2)

    def matmul(self, x: Tensor, weight: Tensor, out: Tensor, *, gate: Activation | None = None) -> None:
        self.made.append(tuple(out.shape))
        super().matmul(x, weight, out, gate=gate)


@pytest.fixture
def space() -> Workspace:
    limits = StepBuckets(tiny.engine_config()).limits
    return Workspace(WorkspacePlan(MODEL, limits, torch.float32), torch.device("cpu"))


def _matrix(outputs: int, columns: int, *, bias: bool = False) -> Matrix:
    return Matrix(torch.randn(outputs, columns) * columns**-0.5, torch.randn(outputs) if bias else None)


def _close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_our_matmuls_have_the_librarys_numbers(space: Workspace, exact: bool, bias: bool) -> None:
    """Biases, and exact numerics, are left to the library."""
    kernels = Own()
    matmuls, hidden = Matmuls(kernels, space, exact), MODEL.hidden_size
    space.normed[:] = torch.randn_like(space.normed)
    matrix = _matrix(space.qkv.shape[1], hidden, bias=bias)
    matmuls(space.normed, matrix, space.qkv, ROWS)
    assert _close(space.qkv[:ROWS], functional.linear(space.normed[:ROWS], matrix.weight, matrix.bias))
    matrix = _matrix(hidden, hidden, bias=bias)
    added = matmuls.project(space.normed, matrix, ROWS).view(-1, ROWS, hidden).sum(0)
    assert _close(added, functional.linear(space.normed[:ROWS], matrix.weight, matrix.bias))
    own = [(ROWS, space.qkv.shape[1]), (2, ROWS, hidden)]
    assert kernels.made == ([] if exact or bias else own)


@pytest.mark.parametrize(
    ("rows", "columns", "splits"),
    [
        (ROWS, 512, 4),
        (ROWS, 128, 1),
        (ROWS, 96, 1),
        (MAX_MATMUL_ROWS, 512, 2),
        (MAX_MATMUL_ROWS + 1, 512, 1),
    ],
)
def test_a_librarys_matmul_is_split_along_k(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, splits: int
) -> None:
    """Fewer splits for more outputs, and none where the columns of a split would not be whole tiles."""
    hidden = MODEL.hidden_size
    monkeypatch.setattr(matmul_module, "_FEW_OUTPUTS", (MAX_MATMUL_ROWS - 1) * hidden)
    limits = StepBuckets(tiny.engine_config(max_batch_tokens=512)).limits
    space = Workspace(WorkspacePlan(MODEL, limits, torch.float32), torch.device("cpu"))
    x, matrix = torch.randn(rows, columns), _matrix(hidden, columns)
    made = Matmuls(TorchKernels(), space, exact=False).project(x, matrix, rows)
    assert made.numel() == splits * rows * hidden
    assert _close(made.view(splits, rows, hidden).sum(0), functional.linear(x, matrix.weight))


@pytest.mark.parametrize(("exact", "bias"), [(True, False), (False, True)])
def test_exact_and_biased_matmuls_are_whole(space: Workspace, exact: bool, bias: bool) -> None:
    matrix = _matrix(MODEL.hidden_size, 512, bias=bias)
    x = torch.randn(len(space.projected), 512)
    made = Matmuls(TorchKernels(), space, exact).project(x, matrix, ROWS)
    assert made.shape == (ROWS, MODEL.hidden_size)


@pytest.mark.parametrize("kernels", [Own(), TorchKernels()])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_matmuls(space: Workspace, kernels: TorchKernels, activation: Activation) -> None:
    space.normed[:] = torch.randn_like(space.normed)
    matrix = _matrix(space.gate_up.shape[1], space.normed.shape[1])
    Matmuls(kernels, space, exact=False).gated(space.normed, matrix, activation, space.gated, ROWS)
    gate, up = functional.linear(space.normed[:ROWS], matrix.weight).chunk(2, -1)
    shaped = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    assert _close(space.gated[:ROWS], shaped * up)

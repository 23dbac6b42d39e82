"""The small operations between matmuls, in torch. The native kernels have the same ones."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kakeya.models.config import Activation

# Below this many elements torch stays on one thread; above, its threads may cut a row anywhere.
_ONE_THREAD_ELEMENTS = 32768
# Rows of a multiple of this many elements leave no tail for the scalar code at a vector loop's end.
_VECTOR_MULTIPLE = 64


class RowOps(Protocol):
    """Operations on float32 rows; results are new tensors."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [M, K] scaled to unit mean square, times weight [K]."""

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        """activation(gate) * up for gate_up [M, 2 I], gate first; [M, I]."""


class TorchRowOps:
    """RowOps in plain torch. `exact`: a row's bits do not depend on the other rows."""

    def __init__(self, exact: bool) -> None:
        self._exact = exact

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, eps)

    def gated(self, gate_up: Tensor, activation: Activation) -> Tensor:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        step = self._rows_together(width) if self._exact else rows
        if rows <= step:
            return _gated(gate_up, width, activation)
        return torch.cat([_gated(part, width, activation) for part in torch.split(gate_up, step)])

    @staticmethod
    def _rows_together(width: int) -> int:
        """How many rows torch's loops treat alike: exp and tanh round differently in their scalar tails."""
        if width % _VECTOR_MULTIPLE:
            return 1
        return max(1, (_ONE_THREAD_ELEMENTS - 1) // width)


def _gated(gate_up: Tensor, width: int, activation: Activation) -> Tensor:
    gate, up = gate_up[:, :width], gate_up[:, width:]
    activated = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return activated.mul_(up)


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), in place and a row at a time: each row's bits are its own."""
    for row in x:
        row.div_(cap).tanh_().mul_(cap)
    return x

"""One layer's weights, whatever a matrix is there: as a file has it, ready to multiply, or on a device."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from torch import Tensor

M = TypeVar("M")
N = TypeVar("N")

_MATRICES = ("qkv", "output", "gate_up", "down")


@dataclass(frozen=True, slots=True)
class Layer(Generic[M]):
    """One layer's matrices and norms. Norm weights are float32 and have the family's offset added."""

    input_norm: Tensor | None
    qkv: M
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: M
    post_attention_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: M
    down: M
    post_mlp_norm: Tensor | None
    scalar: Tensor | None = None  # float32 [1], of the layer's output

    @property
    def matrices(self) -> dict[str, M]:
        """By name, in the order in which they multiply."""
        return {name: getattr(self, name) for name in _MATRICES}

    def map(
        self, matrix: Callable[[str, M], N], vector: Callable[[Tensor], Tensor] = lambda it: it
    ) -> "Layer[N]":
        """The layer with `matrix(name, old)` in place of its matrices, and `vector(old)` of its norms."""
        mapped: dict[str, Any] = {name: matrix(name, old) for name, old in self.matrices.items()}
        for name in (field.name for field in fields(self) if field.name not in _MATRICES):
            old = getattr(self, name)
            mapped[name] = None if old is None else vector(old)
        return Layer(**mapped)

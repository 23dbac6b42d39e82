"""The buffers of a step: allocated once, sliced to the rows of each step, shared by all graphs."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from kakeya.engine.cuda.shapes import StepLimits
from kakeya.kernels.gpu import MAX_K_SPLITS, MAX_MATMUL_ROWS
from kakeya.models.config import ModelConfig

# In exact numerics every matmul has this many rows: one shape, one order of additions.
EXACT_TILE = 128


def whole_tiles(rows: int) -> int:
    return -(-rows // EXACT_TILE) * EXACT_TILE


@dataclass(frozen=True)
class WorkspacePlan:
    """The size of each buffer, in whole exact tiles."""

    model: ModelConfig
    limits: StepLimits
    element: torch.dtype

    @property
    def buffers(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        model, rows, head_rows = self.model, whole_tiles(self.limits.rows), whole_tiles(self.limits.head_rows)
        hidden, inner = model.hidden_size, model.intermediate_size
        return {
            "hidden": ((rows, hidden), torch.float32),
            "normed": ((rows, hidden), self.element),
            "qkv": ((rows, model.query_size + 2 * model.kv_size), self.element),
            "attended": ((rows, model.query_size), self.element),
            "projected": ((rows, hidden), self.element),
            "partial_sums": ((MAX_K_SPLITS * min(rows, MAX_MATMUL_ROWS) * hidden,), torch.float32),
            "gate_up": ((rows, 2 * inner), self.element),
            "gated": ((rows, inner), self.element),
            "gathered": ((head_rows, hidden), self.element),
            "logits": ((head_rows, model.vocab_size), torch.float32),
            "rotations": ((len(set(model.layer_ropes)), 2 * rows * model.head_dim), torch.float32),
            "sampled": ((rows,), torch.int32),
        }

    @property
    def nbytes(self) -> int:
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.buffers.values())


class Workspace:
    """The buffers themselves. Rows beyond a step's own hold what earlier steps left."""

    def __init__(self, plan: WorkspacePlan, device: torch.device) -> None:
        buffers = {
            name: torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in plan.buffers.items()
        }
        self.hidden: Tensor = buffers["hidden"]
        self.normed: Tensor = buffers["normed"]
        self.qkv: Tensor = buffers["qkv"]
        self.attended: Tensor = buffers["attended"]
        self.projected: Tensor = buffers["projected"]
        self.gate_up: Tensor = buffers["gate_up"]
        self.gated: Tensor = buffers["gated"]
        self.gathered: Tensor = buffers["gathered"]
        self.logits: Tensor = buffers["logits"]
        self.sampled: Tensor = buffers["sampled"]
        self._rotations: Tensor = buffers["rotations"]
        self._partial_sums: Tensor = buffers["partial_sums"]

    def partial_sums(self, splits: int, rows: int, dtype: torch.dtype) -> Tensor:
        """[splits, rows, hidden], contiguous."""
        width = self.hidden.shape[1]
        return self._partial_sums.view(dtype)[: splits * rows * width].view(splits, rows, width)

    def rotations(self, rope: int, rows: int, half: int) -> Tensor:
        """[4, rows, half] for the RoPE of this index, contiguous."""
        return self._rotations[rope, : 4 * rows * half].view(4, rows, half)

"""A trained drafter's network on a CPU: its matrices ready to multiply, and its arithmetic.

It knows neither sessions nor their memory: it is handed `attend`, as the verifier's decoder is.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakeya.config import EngineConfig
from kakeya.engine.cpu.attention import rotate
from kakeya.kernels import Kernels
from kakeya.models.config import ModelConfig
from kakeya.models.decoder import Attend
from kakeya.models.drafter import StoredDrafter, drafter_rope
from kakeya.models.float_types import FLOAT_TYPES
from kakeya.models.linear import Linear, dense_linear, quantized_linear
from kakeya.models.quantized import GROUP, quantize
from kakeya.models.rope import rope_tables
from kakeya.models.row_ops import RowOps, TorchRowOps, softcap


@dataclass(frozen=True)
class _Layer:
    history_norm: Tensor
    history_kv: Linear
    token_norm: Tensor
    state_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class DraftNetwork:
    """Rows are positions of any sessions; only `attend` relates them.

    Matrices are 8-bit integers where native kernels multiply, else floats: a guess need not be exact.
    """

    def __init__(
        self,
        stored: StoredDrafter,
        head: Tensor | None,
        model: ModelConfig,
        config: EngineConfig,
        kernels: Kernels | None,
    ) -> None:
        """`head`: the verifier's weights for the tokens that are guessed, [draft vocabulary, hidden]; None
        where these are all, and the verifier's own head is asked."""
        self.config = stored.config
        self._tensors = stored.tensors if head is None else {**stored.tensors, "head": head}
        self._dtype, self._kernels = FLOAT_TYPES[config.dtype], kernels
        self._rope = model.layer_ropes[drafter_rope(model)].within(config.cache.capacity)
        self._ops: RowOps = kernels or TorchRowOps(exact=False)
        self._fuse = self._linear("fuse.weight", self._vector("fuse.bias"))
        self._final_norm = self._vector("final_norm")
        self._head = None if head is None else self._linear("head")
        self._softcap = model.logit_softcap
        self._layers = [self._layer(f"layers.{index}.") for index in range(self.config.layers)]
        self.unknown = self._vector("unknown") if self.config.kind == "block" else torch.empty(0)
        """In place of the embeddings of a block's tokens from the second on, [block - 1, hidden]."""
        self._tensors = {}

    def features(self, outputs: Tensor) -> Tensor:
        """The features [rows, hidden] of positions, from the verifier's outputs [rows, taps * hidden]."""
        return self._fuse(outputs)

    def history(self, features: Tensor, positions: Sequence[int]) -> Tensor:
        """Keys, which are rotated, and values of positions, [layers, 2, rows, kv_heads, head_dim]."""
        cos, sin = self.angles(positions)
        pairs = []
        for layer in self._layers:
            both = layer.history_kv(self._normed(features, layer.history_norm))
            keys, values = self._heads(both).chunk(2, 1)
            pairs.append(torch.stack([rotate(keys, cos, sin), values]))
        return torch.stack(pairs)

    def forward(self, embedded: Tensor, state: Tensor, attend: Attend) -> Tensor:
        """The states [rows, hidden] after all layers, from those before and the rows of embeddings."""
        sizes = (self.config.num_heads, self.config.num_kv_heads, self.config.num_kv_heads)
        for index, layer in enumerate(self._layers):
            seen = [self._normed(embedded, layer.token_norm), self._normed(state, layer.state_norm)]
            q, k, v = self._heads(layer.qkv(torch.cat(seen, dim=1))).split_with_sizes(sizes, 1)
            state = layer.output(attend(index, q, k, v), state)
            gate_up = layer.gate_up(self._normed(state, layer.mlp_norm))
            state = layer.down(self._ops.gated(gate_up, "silu"), state)
        return state

    def angles(self, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """cos and sin at each position, [rows, head_dim / 2]."""
        return rope_tables(self._rope, positions)

    def final(self, state: Tensor) -> Tensor:
        """What a head is given."""
        return self._normed(state, self._final_norm)

    def logits(self, state: Tensor) -> Tensor:
        """float32 [rows, draft vocabulary], where the drafter has a head of its own."""
        assert self._head is not None
        logits = self._head(self.final(state))
        return logits if self._softcap is None else softcap(logits, self._softcap)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._ops.rms_norm(x, weight, self.config.norm_eps)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, self.config.head_dim)

    def _layer(self, prefix: str) -> _Layer:
        return _Layer(
            history_norm=self._vector(prefix + "history_norm"),
            history_kv=self._linear(prefix + "history_kv"),
            token_norm=self._vector(prefix + "token_norm"),
            state_norm=self._vector(prefix + "state_norm"),
            qkv=self._linear(prefix + "qkv"),
            output=self._linear(prefix + "output"),
            mlp_norm=self._vector(prefix + "mlp_norm"),
            gate_up=self._linear(prefix + "gate_up"),
            down=self._linear(prefix + "down"),
        )

    def _vector(self, name: str) -> Tensor:
        return self._tensors[name].float()

    def _linear(self, name: str, bias: Tensor | None = None) -> Linear:
        weight = self._tensors[name]
        if self._kernels is not None and weight.shape[1] % GROUP == 0:
            return quantized_linear(
                quantize(weight, 8), bias, dtype=self._dtype, exact=False, kernels=self._kernels
            )
        return dense_linear(weight.to(self._dtype), bias, exact=False, origin="bf16")

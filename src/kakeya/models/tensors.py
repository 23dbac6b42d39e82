"""A checkpoint's tensors by what they are for, each checked against the configuration.

Nothing is converted here: matrices come as the file has them. So the loader decides how they are held, and
never holds more than one layer twice.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from kakeya.errors import CorruptCheckpoint
from kakeya.models.blocks import BlockTensor
from kakeya.models.checkpoint import Checkpoint
from kakeya.models.config import LayerHeads, ModelConfig
from kakeya.models.layer import Layer
from kakeya.models.rope import RopeConfig
from kakeya.models.row_order import fused_rows, head_rows

Stored = Tensor | BlockTensor


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Projections of the same input, stacked in order into one matmul. The bias is float32."""

    parts: tuple[Stored, ...]
    bias: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of the stacked matrix."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def split(self) -> "list[StoredMatrix]":
        """Each part as a matrix of its own."""
        rows = [part.shape[0] for part in self.parts]
        biases = [None] * len(rows) if self.bias is None else torch.split(self.bias, rows)
        return [StoredMatrix((part,), bias) for part, bias in zip(self.parts, biases, strict=True)]


class ModelTensors:
    """Reads a checkpoint's tensors; `num_parameters` counts what has been read so far.

    Every method raises CorruptCheckpoint for a missing tensor or a wrong shape.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.num_parameters = 0
        self._checkpoint = checkpoint
        self._config = checkpoint.config

    def embedding(self) -> StoredMatrix:
        return StoredMatrix((self._table("model.embed_tokens.weight"),))

    def untied_head(self) -> StoredMatrix | None:
        """None where the embedding is the head."""
        return None if self._config.tied_head else StoredMatrix((self._table("lm_head.weight"),))

    def final_norm(self) -> Tensor:
        """Scaled by the scale of the logits, which are matmuls of what it norms."""
        return self._norm("model.norm.weight", self._config.hidden_size) * self._config.logit_scale

    def layer(self, index: int) -> Layer[StoredMatrix]:
        """As the file has it, rows of queries and keys as attention turns them."""
        config, prefix = self._config, f"model.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        heads = config.heads_of(index)
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        input_norm, post_attention_norm, mlp_norm, post_mlp_norm = (
            None if name is None else self._norm(f"{prefix}{name}.weight", hidden)
            for name in _block_norms(config)
        )
        query_norm, key_norm = self._qk_norms(attention, heads, config.layer_ropes[index])
        return Layer(
            input_norm=input_norm,
            qkv=self._qkv(attention, heads, config.layer_ropes[index]),
            query_norm=query_norm,
            key_norm=key_norm,
            output=self._matrix(
                attention, {"o_proj": hidden}, config.num_heads * heads.head_dim, config.output_bias
            ),
            post_attention_norm=post_attention_norm,
            mlp_norm=mlp_norm,
            gate_up=self._matrix(mlp, _gate_up(config), hidden, config.mlp_bias),
            down=self._matrix(mlp, {"down_proj": hidden}, inner, config.mlp_bias),
            post_mlp_norm=post_mlp_norm,
            scalar=self._vector(f"{prefix}layer_scalar", 1) if config.layer_scalars else None,
        )

    def _qkv(self, prefix: str, heads: LayerHeads, rope: RopeConfig) -> StoredMatrix:
        config = self._config
        queries, keys = config.num_heads * heads.head_dim, heads.kv_heads * heads.head_dim
        if config.fused_projections:
            rows = {"qkv_proj": queries + 2 * keys}
            orders = {"qkv_proj": fused_rows(rope, config.num_heads + heads.kv_heads, keys)}
        else:
            rows = {"q_proj": queries, "k_proj": keys}
            rows |= {} if heads.values_are_keys else {"v_proj": keys}
            orders = {"q_proj": head_rows(rope, config.num_heads), "k_proj": head_rows(rope, heads.kv_heads)}
        return self._matrix(prefix, rows, config.hidden_size, config.attention_bias, orders)

    def _qk_norms(
        self, prefix: str, heads: LayerHeads, rope: RopeConfig
    ) -> tuple[Tensor | None, Tensor | None]:
        config = self._config
        if config.qk_norm is None:
            return None, None
        whole = config.qk_norm == "width"
        q_heads, k_heads = (config.num_heads, heads.kv_heads) if whole else (1, 1)
        return (
            self._norm(f"{prefix}q_norm.weight", q_heads * heads.head_dim, head_rows(rope, q_heads)),
            self._norm(f"{prefix}k_norm.weight", k_heads * heads.head_dim, head_rows(rope, k_heads)),
        )

    def _table(self, name: str) -> Stored:
        return self._fetch(name, self._config.vocab_size, self._config.hidden_size)

    def _matrix(
        self,
        prefix: str,
        outputs: dict[str, int],
        columns: int,
        with_bias: bool,
        orders: Mapping[str, Tensor | None] = MappingProxyType({}),
    ) -> StoredMatrix:
        parts = tuple(
            self._fetch(f"{prefix}{name}.weight", rows, columns, order=orders.get(name))
            for name, rows in outputs.items()
        )
        if not with_bias:
            return StoredMatrix(parts)
        biases = [
            self._vector(f"{prefix}{name}.bias", rows, orders.get(name)) for name, rows in outputs.items()
        ]
        return StoredMatrix(parts, torch.cat(biases))

    def _norm(self, name: str, size: int, order: Tensor | None = None) -> Tensor:
        return self._vector(name, size, order) + self._config.norm_offset

    def _vector(self, name: str, size: int, order: Tensor | None = None) -> Tensor:
        return as_float(self._fetch(name, size, order=order), torch.float32)

    def _fetch(self, name: str, *shape: int, order: Tensor | None = None) -> Stored:
        stored = self._checkpoint.tensor(name, order)
        if tuple(stored.shape) != shape:
            raise CorruptCheckpoint(
                f"tensor {name} has shape {tuple(stored.shape)}, the configuration needs {shape}"
            )
        self.num_parameters += math.prod(shape)
        return stored


def _block_norms(config: ModelConfig) -> tuple[str | None, str | None, str | None, str | None]:
    """What the norms before and after attention, and before and after the MLP, are called."""
    # Where nothing is normed after attention, its norm is the name of the one before the MLP.
    mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
    return (
        "input_layernorm" if config.pre_norms else None,
        "post_attention_layernorm" if config.post_norms else None,
        mlp_norm if config.pre_norms else None,
        "post_feedforward_layernorm" if config.post_norms else None,
    )


def _gate_up(config: ModelConfig) -> dict[str, int]:
    inner = config.intermediate_size
    fused = config.fused_projections or config.fused_gate_up
    return {"gate_up_proj": 2 * inner} if fused else {"gate_proj": inner, "up_proj": inner}


def as_float(stored: Stored, dtype: torch.dtype) -> Tensor:
    """The tensor in `dtype`, rounded once."""
    if isinstance(stored, Tensor):
        return stored.to(dtype)
    stored.check()
    return stored.dequantize(dtype)

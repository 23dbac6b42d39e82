"""A checkpoint's tensors by what they are for, each checked against the configuration.

Nothing is converted here: matrices come as the file has them, so that whoever loads a model decides how it is
held, and holds no more than one layer of it twice.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kakeya.errors import CorruptCheckpoint
from kakeya.models.blocks import BlockTensor
from kakeya.models.checkpoint import Checkpoint

Stored = Tensor | BlockTensor


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Projections of the same input, to be stacked in order into one product. The bias is float32."""

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


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One layer as the file has it. Norm weights are float32 and have the family's offset added."""

    input_norm: Tensor
    qkv: StoredMatrix
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: StoredMatrix
    post_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: StoredMatrix
    down: StoredMatrix
    post_mlp_norm: Tensor | None


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
        return self._norm("model.norm.weight", self._config.hidden_size)

    def layer(self, index: int) -> StoredLayer:
        config, prefix = self._config, f"model.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        # Gemma's names: a norm before and after each block. Others: post_attention_layernorm is the MLP's.
        mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = {"q_proj": config.query_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        return StoredLayer(
            input_norm=self._norm(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._matrix(attention, qkv, hidden, config.attention_bias),
            query_norm=self._optional_norm(config.qk_norm, f"{attention}q_norm.weight", config.head_dim),
            key_norm=self._optional_norm(config.qk_norm, f"{attention}k_norm.weight", config.head_dim),
            output=self._matrix(attention, {"o_proj": hidden}, config.query_size, config.output_bias),
            post_attention_norm=self._optional_norm(
                config.post_norms, f"{prefix}post_attention_layernorm.weight", hidden
            ),
            mlp_norm=self._norm(f"{prefix}{mlp_norm}.weight", hidden),
            gate_up=self._matrix(mlp, {"gate_proj": inner, "up_proj": inner}, hidden, config.mlp_bias),
            down=self._matrix(mlp, {"down_proj": hidden}, inner, config.mlp_bias),
            post_mlp_norm=self._optional_norm(
                config.post_norms, f"{prefix}post_feedforward_layernorm.weight", hidden
            ),
        )

    def _table(self, name: str) -> Stored:
        return self._fetch(name, self._config.vocab_size, self._config.hidden_size)

    def _matrix(self, prefix: str, outputs: dict[str, int], columns: int, with_bias: bool) -> StoredMatrix:
        parts = tuple(self._fetch(f"{prefix}{name}.weight", rows, columns) for name, rows in outputs.items())
        if not with_bias:
            return StoredMatrix(parts)
        biases = [self._vector(f"{prefix}{name}.bias", rows) for name, rows in outputs.items()]
        return StoredMatrix(parts, torch.cat(biases))

    def _optional_norm(self, present: bool, name: str, size: int) -> Tensor | None:
        return self._norm(name, size) if present else None

    def _norm(self, name: str, size: int) -> Tensor:
        return self._vector(name, size) + self._config.norm_offset

    def _vector(self, name: str, size: int) -> Tensor:
        return as_float(self._fetch(name, size), torch.float32)

    def _fetch(self, name: str, *shape: int) -> Stored:
        stored = self._checkpoint.tensor(name)
        if tuple(stored.shape) != shape:
            raise CorruptCheckpoint(
                f"tensor {name} has shape {tuple(stored.shape)}, the configuration needs {shape}"
            )
        self.num_parameters += math.prod(shape)
        return stored


def as_float(stored: Stored, dtype: torch.dtype) -> Tensor:
    """The tensor in `dtype`, rounded once."""
    if isinstance(stored, Tensor):
        return stored.to(dtype)
    stored.check()
    return stored.dequantize(dtype)

"""A model of a given shape with random weights, made on the device when they are asked for.

Speed does not depend on what the weights are, except that zeros are unfairly cheap.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kakeya.bench.gpu_shapes import Shape
from kakeya.errors import CorruptCheckpoint
from kakeya.models.config import ModelConfig
from kakeya.types import TokenizerFiles

SCALE = 0.02


class RandomCheckpoint:
    """Implements `Checkpoint`: matrices are normal with a small deviation, norms are ones."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        self._shape, self._device, self._seed = shape, device, seed
        self._sizes = _sizes(shape.model)

    @property
    def path(self) -> Path:
        return Path(self._shape.name)

    @property
    def files(self) -> tuple[Path, ...]:
        return ()

    @property
    def config(self) -> ModelConfig:
        return self._shape.model

    @property
    def fingerprint(self) -> str:
        return f"random/{self._shape.name}/{self._seed}"

    def tensor(self, name: str, order: Tensor | None = None) -> Tensor:
        """bfloat16, on the device; the same whenever it is asked for."""
        assert order is None, "every shape is rotated whole"
        size = self._sizes.get(name.partition("layers.")[2].partition(".")[2] or name)
        if size is None:
            raise CorruptCheckpoint(f"the shape {self._shape.name} has no tensor {name}")
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16, device=self._device)
        generator = torch.Generator(self._device).manual_seed(self._seed + zlib.crc32(name.encode()))
        drawn = torch.empty(size, dtype=torch.bfloat16, device=self._device)
        return drawn.normal_(0.0, SCALE, generator=generator)

    def release(self) -> None:
        """Nothing is held."""

    def tokenizer_files(self) -> TokenizerFiles:
        return tiny_tokenizer()


def _sizes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """By name; those of a layer without the layer's own prefix."""
    hidden, inner = model.hidden_size, model.intermediate_size
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (model.vocab_size, hidden),
        "model.norm.weight": (hidden,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (model.query_size, hidden),
        "self_attn.k_proj.weight": (model.kv_size, hidden),
        "self_attn.v_proj.weight": (model.kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, model.query_size),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if model.qk_norm:
        sizes |= {"self_attn.q_norm.weight": (model.head_dim,), "self_attn.k_norm.weight": (model.head_dim,)}
    if not model.tied_head:
        sizes["lm_head.weight"] = (model.vocab_size, hidden)
    return sizes


def tiny_tokenizer() -> TokenizerFiles:
    """A tokenizer of two tokens: random weights have nothing to say."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    files: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [], "dropout": None, "unk_token": None},
    }
    return TokenizerFiles(json.dumps(files).encode())

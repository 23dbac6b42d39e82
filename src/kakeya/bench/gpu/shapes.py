"""The shapes that `bench gpu` measures: sizes of public models, with random weights made on the device.

Speed does not depend on what the weights are, except that zeros are unfairly cheap.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kakeya.errors import CorruptCheckpoint
from kakeya.models.config import ModelConfig
from kakeya.models.hf_config import config_from_hf
from kakeya.types import TokenizerFiles

ELEMENT_BYTES = 2  # of weights, activations and cache alike
WEIGHT_DEVIATION = 0.02


@dataclass(frozen=True)
class Shape:
    """A model's sizes under a name, as its config.json has them, and the traffic and work that they imply."""

    name: str
    config: Mapping[str, Any]

    @cached_property
    def model(self) -> ModelConfig:
        return config_from_hf(self.config)

    @property
    def layer_weights(self) -> int:
        """Elements of all layers' matrices. Norms are a thousandth of that and not counted."""
        model = self.model
        attention = model.hidden_size * (2 * model.query_size + 2 * model.kv_size)
        return model.num_layers * (attention + 3 * model.hidden_size * model.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.model.vocab_size * self.model.hidden_size

    @property
    def kv_bytes_per_token(self) -> int:
        return self.model.num_layers * 2 * self.model.kv_size * ELEMENT_BYTES

    def floor_seconds(self, rows: int, tokens: int, bytes_per_second: float) -> float:
        """No step of `rows` sessions with so many cached tokens each can be shorter: it reads the layers, the
        head and the caches once, at the measured speed. Of the embedding it reads a few rows."""
        weights = (self.layer_weights + self.head_weights) * ELEMENT_BYTES
        return (weights + rows * tokens * self.kv_bytes_per_token) / bytes_per_second

    def prompt_flops(self, rows: int) -> int:
        """Of the matmuls of a prompt, whose last row goes through the head. Attention is not counted."""
        return 2 * (rows * self.layer_weights + self.head_weights)

    def random_tokens(self, count: int, seed: int) -> list[int]:
        """Of its vocabulary, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        drawn: list[int] = torch.randint(self.model.vocab_size, (count,), generator=generator).tolist()
        return drawn

    def histories(self, count: int, length: int) -> list[list[int]]:
        """Random tokens, different for each."""
        return [self.random_tokens(length, seed) for seed in range(count)]


def _shape(
    name: str, family: str, vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int,
    head_dim: int, *, tied: bool, theta: float = 1e6, eps: float = 1e-6,
) -> Shape:  # fmt: skip
    config = {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": tied,
        "rope_theta": theta,
        "rms_norm_eps": eps,
        "max_position_embeddings": 2**20,
        "bos_token_id": None,
        "eos_token_id": None,  # no token ends a sequence early
    }
    return Shape(name, config)


QWEN3_8B = _shape("qwen3-8b", "qwen3", 151_936, 4096, 12_288, 36, 32, 8, 128, tied=False)
QWEN3_06B = _shape("qwen3-0.6b", "qwen3", 151_936, 1024, 3072, 28, 16, 8, 128, tied=True)
SMOLLM2 = _shape("smollm2-135m", "llama", 49_152, 576, 1536, 30, 9, 3, 64, tied=True, theta=1e5, eps=1e-5)
TINY_QWEN3 = _shape("tiny-qwen3", "qwen3", 64, 32, 48, 2, 4, 2, 16, tied=False)
TINY_LLAMA = _shape("tiny-llama", "llama", 64, 48, 64, 2, 3, 1, 16, tied=True)
SHAPES = {shape.name: shape for shape in (QWEN3_8B, QWEN3_06B, SMOLLM2, TINY_QWEN3, TINY_LLAMA)}


class RandomCheckpoint:
    """Implements `Checkpoint`: matrices are normally distributed, norms are ones."""

    def __init__(self, shape: Shape, device: torch.device, seed: int = 0) -> None:
        self.path, self.files, self.config = Path(shape.name), (), shape.model
        self.matrix_elements: dict[str, int] = {}
        self.fingerprint = f"random/{shape.name}/{seed}"
        self._device, self._seed, self._sizes = device, seed, _sizes(shape.model)

    def tensor(self, name: str, order: Tensor | None = None) -> Tensor:
        """bfloat16, on the device; the same at every call."""
        assert order is None, "every shape is rotated whole"
        size = self._sizes.get(name.partition("layers.")[2].partition(".")[2] or name)
        if size is None:
            raise CorruptCheckpoint(f"the shape {self.path} has no tensor {name}")
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16, device=self._device)
        generator = torch.Generator(self._device).manual_seed(self._seed + zlib.crc32(name.encode()))
        drawn = torch.empty(size, dtype=torch.bfloat16, device=self._device)
        return drawn.normal_(0.0, WEIGHT_DEVIATION, generator=generator)

    def release(self) -> None:
        """Nothing is held."""

    def tokenizer_files(self) -> TokenizerFiles:
        """A tokenizer of two tokens: nobody reads what random weights say."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        model = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}
        written = {"version": "1.0", "pre_tokenizer": byte_level, "decoder": byte_level, "model": model}
        return TokenizerFiles(json.dumps(written).encode())


def _sizes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """By name; the tensors of a layer without the layer's prefix."""
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
        sizes |= {f"self_attn.{each}_norm.weight": (model.head_dim,) for each in "qk"}
    if not model.tied_head:
        sizes["lm_head.weight"] = (model.vocab_size, hidden)
    return sizes

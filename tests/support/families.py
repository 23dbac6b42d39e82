"""Tiny random checkpoints of every family, made and saved by `transformers`, and a plain causal attention."""

from pathlib import Path

import torch
import transformers
from torch import Tensor

from kakeya.models.checkpoint import Checkpoint, open_checkpoint
from kakeya.models.config import ModelConfig
from kakeya.models.decoder import Attend, Decoder
from kakeya.models.loader import load_decoder
from kakeya.models.rope import rope_tables
from kakeya.types import DType, Numerics, WeightFormat

VOCAB = 71
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# Heads of 16 and four layers: past the wrap of a small cache, where families differ.
BOUNDED_SHAPE = SHAPE | {"head_dim": 16, "num_hidden_layers": 4}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 4}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
}
GEMMA4 = SHAPE | {
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 5,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
BOUNDED = {
    "gemma2": transformers.Gemma2Config(**BOUNDED_SHAPE, sliding_window=5, query_pre_attn_scalar=24),
    "gemma3": transformers.Gemma3TextConfig(**BOUNDED_SHAPE, sliding_window=5, sliding_window_pattern=2),
    "mistral": transformers.MistralConfig(**BOUNDED_SHAPE, sliding_window=7),
    "ministral3": transformers.Ministral3Config(
        **BOUNDED_SHAPE,
        rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.4},
    ),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen3": transformers.Qwen3Config(**BOUNDED_SHAPE),
    "phi3-short": transformers.Phi3Config(
        **SHAPE | {"num_attention_heads": 2},
        original_max_position_embeddings=64,
        rope_parameters=_LONGROPE,
    ),
    "phi3-long": transformers.Phi3Config(
        **SHAPE | {"num_attention_heads": 2},
        original_max_position_embeddings=8,
        rope_parameters=_LONGROPE,
    ),
    "smollm3": transformers.SmolLM3Config(**BOUNDED_SHAPE, no_rope_layer_interval=2),
    "olmo2": transformers.Olmo2Config(**SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "olmo3": transformers.Olmo3Config(
        **SHAPE | {"num_attention_heads": 2, "num_hidden_layers": 4},
        sliding_window=5,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": _YARN,
        },
    ),
    "granite": transformers.GraniteConfig(
        **SHAPE | {"num_attention_heads": 2},
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.5,
        logits_scaling=0.5,
    ),
}


def save_random(
    config: transformers.PreTrainedConfig, directory: Path, **how: object
) -> transformers.PreTrainedModel:
    """A model of `config` whose every parameter is random, saved to `directory`."""
    torch.manual_seed(0)
    nested = getattr(config, "text_config", None) is not None
    kind = transformers.AutoModelForImageTextToText if nested else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.add_(torch.rand_like(buffer) - 0.5)
        for name, parameter in model.named_parameters():
            spread = 0.3 if "norm" in name or parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(directory, **how)
    return model


@torch.inference_mode()
def expected_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens])).logits[0]


def load_float32(source: Path | Checkpoint) -> Decoder:
    """A checkpoint's own weights, multiplied in float32 by torch."""
    checkpoint = open_checkpoint(source) if isinstance(source, Path) else source
    return load_decoder(
        checkpoint, dtype=DType.FLOAT32, weights=WeightFormat.NATIVE, numerics=Numerics.FAST, kernels=None
    )


@torch.inference_mode()
def decoder_logits(decoder: Decoder, tokens: list[int]) -> Tensor:
    hidden = decoder.forward(torch.tensor(tokens), plain_attend(decoder.config, len(tokens)))
    return decoder.logits(hidden)


def plain_attend(config: ModelConfig, length: int) -> Attend:
    """Causal attention over the rows themselves, positions 0 to length - 1, local spans honoured."""
    distance = torch.arange(length)[:, None] - torch.arange(length)[None, :]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rope = config.layer_ropes[layer].within(length)
        cos, sin = (table[:, None] for table in rope_tables(rope, range(length)))
        group = config.num_heads // k.shape[1]
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin).repeat_interleave(group, dim=1)
        q = q * _temperatures(config, length)[:, None, None]
        scores = torch.einsum("qhd,khd->hqk", q, k) * config.query_scale
        if config.attention_softcap is not None:
            scores = (scores / config.attention_softcap).tanh() * config.attention_softcap
        span = config.layer_windows[layer] or length
        scores = scores.masked_fill((distance < 0) | (distance >= span), -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.repeat_interleave(group, dim=1)).flatten(1)

    return attend


def _temperatures(config: ModelConfig, length: int) -> Tensor:
    if config.query_temperature is None:
        return torch.ones(length)
    beta, positions = config.query_temperature.beta, config.query_temperature.positions
    return 1 + beta * torch.log(1 + torch.floor(torch.arange(length) / positions))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

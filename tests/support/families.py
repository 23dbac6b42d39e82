"""Tiny random checkpoints of every family, made and saved by `transformers`, and a plain causal attention."""

from pathlib import Path

import torch
import transformers
from torch import Tensor

from kakeya.models.config import ModelConfig
from kakeya.models.decoder import Attend, Decoder
from kakeya.models.rope import rope_tables

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


def save_random(
    config: transformers.PreTrainedConfig, directory: Path, **how: object
) -> transformers.PreTrainedModel:
    """A model of `config` whose every parameter is random, saved to `directory`."""
    torch.manual_seed(0)
    nested = getattr(config, "text_config", None) is not None
    kind = transformers.AutoModelForImageTextToText if nested else transformers.AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.3 if "norm" in name or parameter.dim() == 1 else 1.5 / parameter.shape[-1] ** 0.5
            parameter.add_(torch.randn_like(parameter) * spread)
    model.save_pretrained(directory, **how)
    return model


@torch.inference_mode()
def expected_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens])).logits[0]


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
        group = config.num_heads // config.num_kv_heads
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

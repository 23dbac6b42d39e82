"""The oracle: bounded attention computed the slow and obvious way.

Everything is recomputed from the whole history, in float32. Every pair (t, j) has its own visibility
and its own distance, written down straight from the definition; queries are rotated by that distance
and keys not at all. No cache, no ring, no slots.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def visible_pairs(length: int, sink: int, window: int) -> Tensor:
    """[t, j]: the token at t sees every j < sink and every j with t - window < j <= t."""
    t, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    return (j <= t) & ((j < sink) | (j > t - window))


def distances(length: int, sink: int, window: int) -> Tensor:
    """[t, j]: true distance, except that past the capacity sink i sits at distance (C - 1) - i."""
    t, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    capacity = sink + window
    return torch.where((t >= capacity) & (j < sink), capacity - 1 - j, t - j)


def pair_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    theta: float,
    sink: int,
    window: int,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    local: int | None = None,
    frequencies: Tensor | None = None,
    growth: Tensor | float = 1.0,
) -> Tensor:
    """q [T, heads, d], k and v [T, kv_heads, d], unrotated -> [T, heads * d].

    A layer with a local span sees only pairs whose distance is below it. `frequencies` [d / 2]: where theta
    does not say them. `growth` [d / 2]: of a rotated pair of query and key each.
    """
    length, heads, dim = q.shape
    group = heads // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    inverse = inverse if frequencies is None else frequencies
    angle = distances(length, sink, window)[..., None].double() * inverse  # [T, T, d/2]
    cos, sin = ((growth**2 * part).float()[:, :, None] for part in (angle.cos(), angle.sin()))
    first, second = q[:, None, :, : dim // 2], q[:, None, :, dim // 2 :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)  # [T, T, heads, d]
    scores = torch.einsum("tjhd,jhd->htj", rotated, k) * (dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    visible = visible_pairs(length, sink, window)
    if local is not None:
        visible &= distances(length, sink, window) < local
    scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("htj,jhd->thd", scores.softmax(dim=-1), v).reshape(length, heads * dim)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight


class Oracle:
    """A Llama run over whole histories: its config.json and its float32 tensors by name."""

    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.config, self.tensors = config, tensors

    @classmethod
    def of_directory(cls, directory: Path) -> "Oracle":
        """A checkpoint read with safetensors alone."""
        config = json.loads((directory / "config.json").read_text())
        return cls(config, load_file(directory / "model.safetensors"))

    def logits(self, tokens: list[int], sink: int, window: int) -> Tensor:
        """Next-token logits after each token [T, vocab]."""
        config, tensors = self.config, self.tensors
        eps, dim = config["rms_norm_eps"], config["head_dim"]
        x = tensors["model.embed_tokens.weight"][tokens]
        for layer in range(config["num_hidden_layers"]):
            weight = {
                name.removeprefix(f"model.layers.{layer}.").removesuffix(".weight"): tensor
                for name, tensor in tensors.items()
                if name.startswith(f"model.layers.{layer}.")
            }
            h = rms_norm(x, weight["input_layernorm"], eps)
            q, k, v = (
                (h @ weight[f"self_attn.{name}_proj"].T).view(len(tokens), -1, dim)
                for name in ("q", "k", "v")
            )
            mixed = pair_attention(q, k, v, config["rope_theta"], sink, window)
            x = x + mixed @ weight["self_attn.o_proj"].T
            h = rms_norm(x, weight["post_attention_layernorm"], eps)
            gate, up = h @ weight["mlp.gate_proj"].T, h @ weight["mlp.up_proj"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ weight["mlp.down_proj"].T
        return rms_norm(x, tensors["model.norm.weight"], eps) @ tensors["model.embed_tokens.weight"].T

    def greedy(self, tokens: list[int], count: int, sink: int, window: int) -> list[int]:
        """The next `count` tokens, recomputing everything for each."""
        history = list(tokens)
        for _ in range(count):
            history.append(int(self.logits(history, sink, window)[-1].argmax()))
        return history[len(tokens) :]

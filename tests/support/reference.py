"""References: bounded attention and the kernels, computed the slow and obvious way.

The oracle recomputes everything from the whole history, in float32. Every pair (t, j) has its own visibility
and its own distance, written down straight from the definition; queries are rotated by that distance
and keys not at all. No cache, no ring, no slots.

The other functions compute what the native kernels compute, with the same arguments. Sums are float64, so
the kernels agree with them to float32 accuracy, not bit for bit; the quantized values and the contents of the
cache are the same bits.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

GROUP = 32


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


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
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
            h = _rms_norm(x, weight["input_layernorm"], eps)
            q, k, v = (
                (h @ weight[f"self_attn.{name}_proj"].T).view(len(tokens), -1, dim)
                for name in ("q", "k", "v")
            )
            mixed = pair_attention(q, k, v, config["rope_theta"], sink, window)
            x = x + mixed @ weight["self_attn.o_proj"].T
            h = _rms_norm(x, weight["post_attention_layernorm"], eps)
            gate, up = h @ weight["mlp.gate_proj"].T, h @ weight["mlp.up_proj"].T
            x = x + (gate * torch.sigmoid(gate) * up) @ weight["mlp.down_proj"].T
        return _rms_norm(x, tensors["model.norm.weight"], eps) @ tensors["model.embed_tokens.weight"].T

    def greedy(self, tokens: list[int], count: int, sink: int, window: int) -> list[int]:
        """The next `count` tokens, recomputing everything for each."""
        history = list(tokens)
        for _ in range(count):
            history.append(int(self.logits(history, sink, window)[-1].argmax()))
        return history[len(tokens) :]


def dequantize(q: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """w = q * scale + minimum in float64, [N, K]."""
    groups = q.double().view(q.shape[0], -1, GROUP)
    return (groups * scale.double()[..., None] + minimum.double()[..., None]).flatten(1)


def round_activations(x: Tensor, group: int = GROUP) -> Tensor:
    """x [M, K] with each group of columns rounded to 8 bits: absmax / 127 times whole numbers, in float64."""
    groups = x.reshape(x.shape[0], -1, group)
    most = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(most < 1e-30, 0.0, 127.0 / most)
    return ((groups * inverse).round().double() * (most / 127.0).double()).flatten(1)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """residual + round_activations(x) w^T + bias for a dequantized w [N, K]."""
    y = round_activations(x) @ w.T
    if bias is not None:
        y = y + bias
    if residual is not None:
        y = residual + y
    return y.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()).float()


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    active = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return (active * up).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + D / 2) of x [heads, D] by one row's angles [D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    sink_cos: Tensor,
    sink_sin: Tensor,
    pool: Tensor,
    layer: int,
    segments: Tensor,
    sinks: Tensor,
    capacity: int,
    scale: float,
    softcap: float = 0.0,
    local_window: int = 0,
) -> Tensor:
    """One row at a time: write its key and value to the slab, then attend to what it sees. Changes `pool`."""
    slots, group = pool.shape[4], q.shape[1] // k.shape[1]
    out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]))
    for (slab, first, rows, start), sink in zip(segments.tolist(), sinks.tolist(), strict=True):
        keys, values = pool[slab, layer]
        for row, t in enumerate(range(start, start + rows), first):
            keys[:, _slot(t, sink, slots)] = rotate(k[row], cos[row], sin[row]).to(pool.dtype)
            values[:, _slot(t, sink, slots)] = v[row].to(pool.dtype)
            seen = _seen(t, sink, capacity, local_window)
            at = [_slot(j, sink, slots) for j in seen]
            wide_keys, wide_values = (x[:, at].double().repeat_interleave(group, 0) for x in (keys, values))
            query = q[row].double()
            windowed, sunk = rotate(query, cos[row], sin[row]), rotate(query, sink_cos[row], sink_sin[row])
            is_sink = torch.tensor([j < sink for j in seen])[None, :, None]
            scores = (torch.where(is_sink, sunk[:, None], windowed[:, None]) * wide_keys).sum(-1) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out[row] = torch.einsum("hs,hsd->hd", scores.softmax(-1), wide_values).flatten().float()
    return out


def _slot(position: int, sink: int, slots: int) -> int:
    return position if position < sink else sink + (position - sink) % (slots - sink)


def _seen(t: int, sink: int, capacity: int, local_window: int) -> list[int]:
    """The positions that the row at t attends to."""
    span = local_window or t + 1
    sunk = [j for j in range(min(sink, t + 1)) if min(t, capacity - 1) - j < span]
    return sunk + [j for j in range(max(sink, t - (capacity - sink) + 1), t + 1) if t - j < span]

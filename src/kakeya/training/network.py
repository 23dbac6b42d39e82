"""The drafter's network for training: every position of a batch of conversations at once.

Shapes: B conversations of L positions, in each of them A *anchors* (positions to draft from), Q places of a
draft that are computed together, K places that are there to attend to; n is the hidden size, D a head's.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kakeya.models.drafter import DrafterConfig

Weights = Mapping[str, Tensor]


def new_weights(config: DrafterConfig, final_norm: Tensor, seed: int) -> dict[str, Tensor]:
    """Where training begins: float32 on the host. The last norm begins as the verifier's."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in config.shapes.items():
        if len(shape) == 2:
            weights[name] = torch.randn(shape, generator=generator) * _spread(name, shape[1])
        else:
            weights[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
    weights["final_norm"] = final_norm.detach().cpu().clone()
    return weights


def _spread(name: str, inputs: int) -> float:
    if name == "unknown":
        return 1.0  # as an embedding, which is normed
    shrunk = name.endswith((".output", ".down"))  # what is added to the state begins small
    return (0.5 if shrunk else 1.0) / math.sqrt(inputs)


@dataclass(frozen=True)
class Standard:
    """Mean and deviation of each dimension of the verifier's features, float32 [taps * n]."""

    mean: Tensor
    deviation: Tensor

    def __call__(self, raw: Tensor) -> Tensor:
        return (raw.float() - self.mean) / self.deviation

    def undo_last(self, standardised: Tensor) -> Tensor:
        """The outputs of the last layer, from the last part of standardised features."""
        width = standardised.shape[-1]
        return standardised.float() * self.deviation[-width:] + self.mean[-width:]


def folded(weights: Weights, standard: Standard) -> dict[str, Tensor]:
    """The same network for features as the verifier gives them."""
    matrix = weights["fuse.weight"].double() / standard.deviation.double()
    # The file rounds the matrix: what the rounded one makes of the mean must go, not what this one does.
    held = matrix.to(torch.bfloat16).double()
    bias = weights["fuse.bias"].double() - held @ standard.mean.double()
    return {**weights, "fuse.weight": held.float(), "fuse.bias": bias.float()}


@dataclass(frozen=True)
class Keys:
    """Keys, rotated, and values: [B, kv heads, L, D] of a history, [B, kv heads, A, K, D] of drafts."""

    keys: Tensor
    values: Tensor

    def with_place(self, later: "Keys") -> "Keys":
        return Keys(torch.cat([self.keys, later.keys], -2), torch.cat([self.values, later.values], -2))


class Network:
    """One set of weights, cast to the element type of the matmuls, and what does not change."""

    def __init__(
        self,
        config: DrafterConfig,
        weights: Weights,
        rotations: tuple[Tensor, Tensor],
        query_scale: float,
        dtype: torch.dtype,
    ) -> None:
        self.config, self._scale = config, query_scale
        self._cos, self._sin = rotations
        self._weights = {
            name: tensor.to(dtype) if tensor.ndim == 2 else tensor for name, tensor in weights.items()
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name]

    def features(self, standardised: Tensor) -> Tensor:
        """float32 [..., n] from [..., taps * n]"""
        return self._matmul(standardised, "fuse.weight").float() + self["fuse.bias"]

    def history(self, features: Tensor) -> list[Keys]:
        """What each layer attends to, for features [B, L, n] of the positions from 0 on."""
        length = features.shape[1]
        cos, sin = self._cos[:length], self._sin[:length]
        layers = []
        for layer in range(self.config.layers):
            normed = self._norm(features, f"layers.{layer}.history_norm")
            keys, values = self._matmul(normed, f"layers.{layer}.history_kv").chunk(2, -1)
            keys, values = (self._by_head(x).transpose(1, 2) for x in (keys, values))
            layers.append(Keys(_rotated(keys, cos, sin), values))
        return layers

    def finish(self, state: Tensor) -> Tensor:
        """States as the verifier's head takes them, float32."""
        return self._norm(state, "final_norm")

    def layer(
        self,
        index: int,
        token: Tensor,
        state: Tensor,
        positions: Tensor,
        attend: "Attention",
        draft: Keys | None,
    ) -> tuple[Tensor, Keys]:
        """One layer over places [B, A, Q]: their states after it, and the draft's keys with theirs.

        `token` and `state` are [B, A, Q, n]. `draft` has the places before these.
        """
        name = f"layers.{index}."
        both = [self._norm(token, name + "token_norm"), self._norm(state, name + "state_norm")]
        qkv = self._matmul(torch.cat(both, -1), name + "qkv")
        queries, own = self._heads(qkv, positions)
        draft = own if draft is None else draft.with_place(own)
        attended = attend(index, queries, draft)
        state = state + self._matmul(attended, name + "output")
        gate, up = self._matmul(self._norm(state, name + "mlp_norm"), name + "gate_up").chunk(2, -1)
        return state + self._matmul(functional.silu(gate) * up, name + "down"), draft

    def _heads(self, qkv: Tensor, positions: Tensor) -> tuple[Tensor, Keys]:
        """Queries [B, kv heads, A, group, Q, D], scaled, and the keys of these places, all rotated."""
        config = self.config
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        sizes = [config.num_heads * config.head_dim, config.kv_size, config.kv_size]
        queries, keys, values = qkv.split_with_sizes(sizes, -1)
        group = (*qkv.shape[:-1], config.num_kv_heads, -1, config.head_dim)
        queries = queries.reshape(group).permute(0, 3, 1, 4, 2, 5)
        keys, values = (self._by_head(x).permute(0, 3, 1, 2, 4) for x in (keys, values))
        own = Keys(_rotated(keys, cos, sin), values)
        cos, sin = (self._scale * x[:, :, :, None] for x in (cos, sin))
        return _rotated(queries, cos, sin), own

    def _by_head(self, x: Tensor) -> Tensor:
        """[..., kv heads, D]"""
        return x.reshape(*x.shape[:-1], self.config.num_kv_heads, self.config.head_dim)

    def _matmul(self, x: Tensor, name: str) -> Tensor:
        weight = self[name]
        return functional.linear(x.to(weight.dtype), weight)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.rms_norm(x.float(), x.shape[-1:], self[name], self.config.norm_eps)


@dataclass(frozen=True)
class Attention:
    """What the places of a draft see: the history up to their anchor, and the draft up to themselves."""

    history: Sequence[Keys]
    hidden: Tensor
    """bool [B, A, L]: positions after the anchor."""

    @classmethod
    def over(cls, history: Sequence[Keys], anchors: Tensor) -> "Attention":
        positions = torch.arange(history[0].keys.shape[2], device=anchors.device)
        return cls(history, positions > anchors[..., None])

    def __call__(self, layer: int, queries: Tensor, draft: Keys) -> Tensor:
        """[B, A, Q, heads * D] for queries [B, kv heads, A, group, Q, D]."""
        batch, kv_heads, anchors, group, places, dim = queries.shape
        history, length = self.history[layer], self.hidden.shape[-1]
        flat = queries.reshape(batch, kv_heads, anchors * group * places, dim)
        by_anchor = flat.view(batch, kv_heads, anchors, group * places, dim)
        past = (flat @ history.keys.transpose(-1, -2)).view(*by_anchor.shape[:-1], length)
        past = past.masked_fill(self.hidden[:, None, :, None], -torch.inf)
        own = by_anchor @ draft.keys.transpose(-1, -2)
        if places > 1:
            later = _later(places, draft.keys.shape[-2], own.device).repeat(group, 1)
            own = own.masked_fill(later, -torch.inf)
        seen = torch.cat([past, own], -1).softmax(-1, dtype=torch.float32).to(queries.dtype)
        from_past, from_own = seen.split_with_sizes([length, own.shape[-1]], -1)
        mixed = (from_past.reshape(*flat.shape[:-1], length) @ history.values).view_as(by_anchor)
        mixed = (mixed + from_own @ draft.values).view(batch, kv_heads, anchors, group, places, dim)
        return mixed.permute(0, 2, 4, 1, 3, 5).flatten(3)


def _later(places: int, keys: int, device: torch.device) -> Tensor:
    """bool [Q, K]: keys that lie behind a place. The places are the last of the keys."""
    return torch.ones(places, keys, dtype=torch.bool, device=device).triu(keys - places + 1)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs (i, i + D / 2) of the last dimension turned by angles [..., D / 2]."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class StepDrafts:
    """Drafts that go step by step from anchors [B, A]: each call gives the states after one more token."""

    def __init__(self, network: Network, attention: Attention, anchors: Tensor, features: Tensor) -> None:
        self._network, self._attention = network, attention
        self._positions = anchors[..., None]
        self._state = _at(features, anchors)[:, :, None]
        self._draft: list[Keys | None] = [None] * network.config.layers

    def step(self, token: Tensor) -> Tensor:
        """[B, A, n] for the head, after the next token, embedded [B, A, n]."""
        self._positions = self._positions + 1
        for index in range(self._network.config.layers):
            self._state, self._draft[index] = self._network.layer(
                index,
                token[:, :, None],
                self._state,
                self._positions,
                self._attention,
                self._draft[index],
            )
        return self._network.finish(self._state)[:, :, 0]


def block_draft(
    network: Network, attention: Attention, anchors: Tensor, features: Tensor, token: Tensor
) -> Tensor:
    """Drafts that fill a whole block from anchors [B, A] and the token after each: [B, A, block, n]."""
    config = network.config
    unknown = network["unknown"].float().expand(*token.shape[:2], -1, -1)
    tokens = torch.cat([token[:, :, None], unknown], 2)
    state = _at(features, anchors)[:, :, None].expand_as(tokens)
    positions = anchors[..., None] + 1 + torch.arange(config.block, device=anchors.device)
    for index in range(config.layers):
        state, _ = network.layer(index, tokens, state, positions, attention, None)
    return network.finish(state)


def drafted_states(network: Network, features: Tensor, anchors: Tensor, tokens: Tensor) -> Iterator[Tensor]:
    """The states for the head at each place, [B, A, n] each, where the tokens that follow are known.

    `tokens` are embedded, [B, A, places, n]: the token after the anchor, and those after it.
    """
    attention = Attention.over(network.history(features), anchors)
    if network.config.kind == "block":
        yield from block_draft(network, attention, anchors, features, tokens[:, :, 0]).unbind(2)
        return
    drafts = StepDrafts(network, attention, anchors, features)
    for place in range(tokens.shape[2]):
        yield drafts.step(tokens[:, :, place])


def _at(features: Tensor, anchors: Tensor) -> Tensor:
    """[B, A, n]"""
    return features.gather(1, anchors[..., None].expand(-1, -1, features.shape[-1]))

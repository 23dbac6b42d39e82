"""The network computes all anchors at once what a plain loop computes for one."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kakeya.models.drafter import DrafterConfig
from kakeya.training.network import Network, Standard, drafted_states, folded, new_weights

CONFIG = DrafterConfig(
    kind="steps",
    taps=(0, 1),
    block=4,
    layers=1,
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=64,
    draft_vocab_size=64,
    norm_eps=1e-5,
    verifier="of a test",
)
SCALE = 0.3
LENGTH = 9


def angles(positions: int) -> tuple[Tensor, Tensor]:
    turned = torch.arange(positions)[:, None] * torch.tensor([1.0, 0.5, 0.1, 0.02])
    return turned.cos(), turned.sin()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + CONFIG.norm_eps).sqrt() * weight


def turn(x: Tensor, position: int) -> Tensor:
    """One head's vector, turned as at this position."""
    cos, sin = (table[position] for table in angles(position + 1))
    half = len(x) // 2
    return torch.cat([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])


class PlainDraft:
    """One anchor, one place at a time, one head at a time: as the format's docstring tells it."""

    def __init__(self, config: DrafterConfig, weights: dict[str, Tensor], taps: Tensor, anchor: int) -> None:
        self.config, self.weights, self.anchor = config, weights, anchor
        features = taps[: anchor + 1] @ weights["fuse.weight"].T + weights["fuse.bias"]
        self.state = features[anchor]
        self.keys = [self._history(layer, features) for layer in range(config.layers)]

    def _history(self, layer: int, features: Tensor) -> list[tuple[Tensor, Tensor]]:
        held = []
        for position, feature in enumerate(features):
            normed = norm(feature, self.weights[f"layers.{layer}.history_norm"])
            held.append(self._kv(self.weights[f"layers.{layer}.history_kv"] @ normed, position))
        return held

    def _kv(self, both: Tensor, position: int) -> tuple[Tensor, Tensor]:
        keys, values = (x.view(self.config.num_kv_heads, -1) for x in both.chunk(2))
        return torch.stack([turn(key, position) for key in keys]), values

    def place(self, token: Tensor, state: Tensor, position: int) -> Tensor:
        for layer in range(self.config.layers):
            state = self._layer(layer, token, state, position)
        return state

    def _layer(self, layer: int, token: Tensor, state: Tensor, position: int) -> Tensor:
        config, heads = self.config, self.config.num_heads
        w = {name: self.weights[f"layers.{layer}.{name}"] for name in self._names()}
        both = torch.cat([norm(token, w["token_norm"]), norm(state, w["state_norm"])])
        qkv = w["qkv"] @ both
        queries = qkv[: heads * config.head_dim].view(heads, -1)
        self.keys[layer].append(self._kv(qkv[heads * config.head_dim :], position))
        attended = []
        for head, query in enumerate(queries):
            shared = head * config.num_kv_heads // heads
            turned = turn(query, position)
            scores = torch.stack([turned @ keys[shared] * SCALE for keys, _ in self.keys[layer]])
            values = torch.stack([values[shared] for _, values in self.keys[layer]])
            attended.append(scores.softmax(0) @ values)
        state = state + w["output"] @ torch.cat(attended)
        gate, up = (w["gate_up"] @ norm(state, w["mlp_norm"])).chunk(2)
        return state + w["down"] @ (torch.nn.functional.silu(gate) * up)

    def _names(self) -> list[str]:
        prefix = "layers.0."
        return [name.removeprefix(prefix) for name in self.config.shapes if name.startswith(prefix)]


def plain_states(
    config: DrafterConfig, weights: dict[str, Tensor], taps: Tensor, anchor: int, tokens: Tensor
) -> list[Tensor]:
    draft, state, states = PlainDraft(config, weights, taps, anchor), None, []
    begun = draft.state
    for place, token in enumerate(tokens):
        if config.kind == "block":
            word = token if place == 0 else weights["unknown"][place - 1]
            state = draft.place(word, begun, anchor + 1 + place)
        else:
            state = draft.place(token, begun if state is None else state, anchor + 1 + place)
        states.append(norm(state, weights["final_norm"]))
    return states


@pytest.mark.parametrize("kind, layers", [("steps", 1), ("steps", 2), ("block", 2)])
def test_anchors_computed_together_are_those_of_a_plain_loop(kind: str, layers: int) -> None:
    config = replace(CONFIG, kind=kind, layers=layers)  # type: ignore[arg-type]
    weights = new_weights(config, torch.rand(config.hidden_size) + 0.5, seed=1)
    generator = torch.Generator().manual_seed(2)
    for vector in weights.values():
        if vector.ndim == 1:
            vector += 0.2 * torch.randn(vector.shape, generator=generator)
    taps = torch.randn(2, LENGTH, 2 * config.hidden_size, generator=generator)
    anchors = torch.tensor([[0, 3, 5], [2, 6, 8]])
    tokens = torch.randn(2, 3, config.block, config.hidden_size, generator=generator)
    network = Network(config, weights, angles(LENGTH + config.block + 1), SCALE, torch.float32)
    states = torch.stack(list(drafted_states(network, network.features(taps), anchors, tokens)), 2)
    for row in range(2):
        for place, anchor in enumerate(anchors[row].tolist()):
            expected = plain_states(config, weights, taps[row], anchor, tokens[row, place])
            torch.testing.assert_close(states[row, place], torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_the_folded_network_takes_features_as_they_come() -> None:
    weights = new_weights(CONFIG, torch.ones(CONFIG.hidden_size), seed=3)
    raw = torch.randn(7, 2 * CONFIG.hidden_size) * torch.logspace(-1, 2, 32) + 50 * torch.randn(32)
    standard = Standard(raw.mean(0), raw.std(0))
    rotations = angles(4)
    inside = Network(CONFIG, weights, rotations, SCALE, torch.float32).features(standard(raw))
    outside = Network(CONFIG, folded(weights, standard), rotations, SCALE, torch.float32).features(raw)
    torch.testing.assert_close(outside, inside, atol=0.03, rtol=0.0)
    torch.testing.assert_close(standard.undo_last(standard(raw)[:, -4:]), raw[:, -4:], atol=1e-4, rtol=1e-4)

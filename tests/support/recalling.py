"""Sessions with recall: small ones, and what they must compute, the slow way.

Every token has an explicit list of keys.
A token that is computed twice, once in its place and once more as a recalled copy, is two entries. An entry
knows which earlier entries it sees, and how far away each of them sits. Everything is float64.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kakeya.config import CacheConfig, EngineConfig
from kakeya.engine.engine import Engine
from kakeya.engine.sequence import TokenSequence
from kakeya.types import Numerics, TokenRange
from support import tiny
from support.reference import Oracle

PINNED, RECALL, WINDOW, SPARE = 2, 6, 8, 4
CACHE = CacheConfig(PINNED, WINDOW, SPARE, RECALL)

Repinned = Mapping[int, Sequence[int]]
"""By the first position that sees them: the positions whose tokens the slots for recall hold from there."""


def ranges(*pairs: tuple[int, int]) -> tuple[TokenRange, ...]:
    return tuple(TokenRange(*pair) for pair in pairs)


PAGES = ranges((20, 23), (30, 33))


def history(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, tiny.VOCAB, (length,), generator=generator).tolist()


def config_of(**changes: object) -> EngineConfig:
    return tiny.engine_config(**{"cache": CACHE, "numerics": Numerics.EXACT, **changes})


def open_with_recall(
    engine: Engine, pinned: int | None = None, recall: int = RECALL, **rest: object
) -> TokenSequence:
    return engine.open("someone", [], pinned, recall, **rest)


def slots(sequence: TokenSequence, first: int = 0, last: int = PINNED + RECALL) -> Tensor:
    """A copy of some of its slots."""
    return torch.cat([part.clone() for part in sequence.slab.by_slot(first, last)])


@dataclass
class _Entries:
    tokens: list[int] = field(default_factory=list)
    seen: list[list[tuple[int, int]]] = field(default_factory=list)
    """Of each entry, what it sees: the number of an entry and the distance to it."""

    def add(self, token: int, seen: list[tuple[int, int]]) -> int:
        number = len(self.tokens)
        self.tokens.append(token)
        self.seen.append([*seen, (number, 0)])
        return number


def entries_of(
    history: Sequence[int], pinned: int, recall: int, window: int, repinned: Repinned
) -> tuple[_Entries, list[int]]:
    """All entries in the order of their computation, and the numbers of those that are the history itself."""
    sink = pinned + recall
    capacity, entries = sink + window, _Entries()
    own: list[int] = []
    slots: list[int] = []
    for t, token in enumerate(history):
        if t in repinned:
            del slots[pinned:]
            for position in repinned[t]:
                place = len(slots)
                seen = [(entry, place - slot) for slot, entry in enumerate(slots)]
                slots.append(entries.add(history[position], seen))
            assert len(slots) == sink
        at = min(t, capacity - 1)
        seen = [(entry, at - slot) for slot, entry in enumerate(slots)]
        seen += [(own[j], t - j) for j in range(max(sink, t - window + 1), t)]
        own.append(entries.add(token, seen))
        if t < sink:
            slots.append(own[-1])
    return entries, own


def oracle_logits(
    oracle: Oracle, history: Sequence[int], pinned: int, recall: int, window: int, repinned: Repinned
) -> Tensor:
    """Next-token logits after each token of the history [T, vocab], float64."""
    entries, own = entries_of(history, pinned, recall, window, repinned)
    config, tensors = oracle.config, {name: each.double() for name, each in oracle.tensors.items()}
    dim, eps = config["head_dim"], config["rms_norm_eps"]
    x = tensors["model.embed_tokens.weight"][entries.tokens]
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weight = {
            name.removeprefix(prefix).removesuffix(".weight"): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        h = _normed(x, weight["input_layernorm"], eps)
        q, k, v = (
            (h @ weight[f"self_attn.{name}_proj"].T).view(len(entries.tokens), -1, dim)
            for name in ("q", "k", "v")
        )
        mixed = torch.stack(
            [_attend(q[e], k, v, seen, config["rope_theta"]) for e, seen in enumerate(entries.seen)]
        )
        x = x + mixed @ weight["self_attn.o_proj"].T
        h = _normed(x, weight["post_attention_layernorm"], eps)
        gate, up = h @ weight["mlp.gate_proj"].T, h @ weight["mlp.up_proj"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ weight["mlp.down_proj"].T
    logits = _normed(x, tensors["model.norm.weight"], eps) @ tensors["model.embed_tokens.weight"].T
    return logits[own]


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: list[tuple[int, int]], theta: float) -> Tensor:
    """One entry's query [heads, d] over the keys that it sees -> [heads * d]."""
    numbers, distances = (list(column) for column in zip(*seen, strict=True))
    heads, dim = q.shape
    k, v = (each[numbers].repeat_interleave(heads // k.shape[1], dim=1) for each in (k, v))  # [n, heads, d]
    inverse = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.tensor(distances, dtype=torch.float64)[:, None, None] * inverse
    first, second = q[None, :, : dim // 2], q[None, :, dim // 2 :]
    turned = torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )
    weights = ((turned * k).sum(-1) * dim**-0.5).softmax(dim=0)  # [n, heads]
    return (weights[..., None] * v).sum(0).reshape(-1)


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(dim=-1, keepdim=True) + eps) * weight

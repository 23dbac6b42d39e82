"""Scores a given text block by block, so that a long one takes no more memory.

The logits are reduced where they are: those on a device never come to the host.
"""

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from kakeya.engine.backend import Reduction
from kakeya.engine.device import DeviceEvent, fetch
from kakeya.errors import InvalidArgument
from kakeya.types import TokenEvent, TokenLogprob

if TYPE_CHECKING:
    from kakeya.engine.engine import Engine

T = TypeVar("T")

# Rows whose float64 log-probabilities exist at once: some 20 MB for a vocabulary of 150,000.
_ROWS_AT_ONCE = 16


def score_blocks(
    engine: "Engine", token_ids: Sequence[int], pinned: int | None = None
) -> Generator[Tensor, None, None]:
    """Next-token logits after each token, in order, some rows at a time [rows, vocab] on the host."""
    return _reduced(engine, token_ids, lambda _, logits: logits.to("cpu", copy=True), pinned)


def score_tokens(
    engine: "Engine", token_ids: Sequence[int], top: int
) -> Generator[list[TokenEvent], None, None]:
    """The tokens with their log-probabilities and those of the `top` most probable in their place, some at a
    time. Nothing comes before the first token, so it has no log-probability."""
    ready = [TokenEvent(token_id) for token_id in token_ids[:1]]
    with closing(_reduced(engine, token_ids, _TextLogProbs(token_ids, top))) as parts:
        for part in parts:
            with engine.using_device():
                ready += part.events()
            yield ready
            ready = []


def _reduced(
    engine: "Engine", token_ids: Sequence[int], reduce: Reduction[T], pinned: int | None = None
) -> Generator[T, None, None]:
    """What `reduce` makes of the logits after each token, in aligned blocks on a slab of its own."""
    if not token_ids:
        raise InvalidArgument("cannot score zero tokens")
    sequence = engine.open("score", (), pinned)
    try:
        engine.append(sequence, token_ids)
        while sequence.slab.written < len(token_ids):
            yield from engine.score_next(sequence, reduce)
    finally:
        engine.close(sequence)


@dataclass(frozen=True)
class _ScoredTokens:
    """Tokens on their way from the device: [tokens, 1 + top], each with the most probable ones behind it."""

    ids: Tensor
    logprobs: Tensor
    computed: DeviceEvent

    def events(self) -> list[TokenEvent]:
        """Wait for them."""
        ids, logprobs = (fetch(table, self.computed).tolist() for table in (self.ids, self.logprobs))
        return [
            TokenEvent(token_id, logprob, tuple(map(TokenLogprob, best, best_logprobs)))
            for (token_id, *best), (logprob, *best_logprobs) in zip(ids, logprobs, strict=True)
        ]


@dataclass(frozen=True)
class _TextLogProbs:
    """A reduction: the model's own distribution (as `LogProbs`) at the tokens of a text and at the best."""

    token_ids: Sequence[int]
    top: int

    def __call__(self, position: int, logits: Tensor) -> _ScoredTokens:
        following = self.token_ids[position + 1 : position + 1 + len(logits)]
        given = torch.tensor(following, dtype=torch.int64).to(logits.device, non_blocking=True)
        # The last token of all has nothing behind it.
        parts = (torch.split(each, _ROWS_AT_ONCE) for each in (given, logits[: len(given)]))
        ids, logprobs = zip(*map(self._picked, *parts), strict=True)
        return _ScoredTokens(torch.cat(ids), torch.cat(logprobs), DeviceEvent(logits.device).record())

    def _picked(self, given: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        # Each row by itself: its bits do not depend on the others.
        logprobs = logits.double().log_softmax(dim=-1)
        ids = torch.cat([given[:, None], best_tokens(logits, self.top)], dim=1)
        return ids, logprobs.gather(1, ids)


def best_tokens(logits: Tensor, count: int) -> Tensor:
    """The ids of each row's `count` greatest, best first, of equal ones the lower id first: [rows, count]."""
    vocabulary = logits.shape[-1]
    # No two keys are equal: a number that orders as the float32 does, and the id in its lower half.
    keys = (logits + 0.0).view(torch.int32).long()  # + 0.0: no -0.0, which equals 0.0 and has other bits
    keys ^= (keys >> 31) & 0x7FFFFFFF
    keys <<= 32
    keys -= torch.arange(vocabulary, device=logits.device)
    return keys.topk(min(count, vocabulary)).indices

"""The proposer seam: anything that guesses the next few tokens cheaply.

The verifier computes a guess in the same pass as the token before it and keeps the longest
prefix it would have produced itself, so a proposer can change the speed and never the output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kakeya.types import SamplingParams

GREEDY = SamplingParams()


class DraftState(Protocol):
    """What a proposer remembers of one session, and owned by that session.

    It is forked, exported and dropped with the session.
    """

    def fork(self) -> "DraftState":
        """An independent copy."""

    def rollback(self, length: int) -> None:
        """Forget everything about positions from `length` on."""

    def export(self) -> Mapping[str, torch.Tensor]:
        """The state as tensors; `Proposer.restore` takes them back."""

    def close(self) -> None:
        """The session is over: give back what the state holds. Called once."""


@dataclass(frozen=True)
class DraftRequest:
    """One decoding session that wants guesses: at most `limit` tokens that follow `tokens`.

    The generate began behind the first `prompt_length` tokens. Its caller expects `prediction` as the
    answer, or parts of it. It is empty where nothing was predicted.
    """

    state: DraftState
    tokens: Sequence[int]
    limit: int
    sampling: SamplingParams = GREEDY
    prompt_length: int = 0
    prediction: Sequence[int] = ()


class Proposer(Protocol):
    """Guesses for a batch of sessions. Called on the engine thread only."""

    @property
    def name(self) -> str:
        """What metrics call it."""

    @property
    def max_draft(self) -> int:
        """The most tokens it ever guesses at once."""

    @property
    def is_free(self) -> bool:
        """Whether a guess costs next to nothing. Then it is asked in every step, and what it guesses is
        compared with what comes even where nothing is drafted."""

    @property
    def hidden_layers(self) -> Sequence[int]:
        """Layers whose outputs it wants to observe."""

    def new_state(self) -> DraftState:
        """The state of a session that has no history yet."""

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> DraftState:
        """The state that `DraftState.export` wrote."""

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        """Guesses for each request, each at most its limit long; none is fine."""

    def observe(self, state: DraftState, start: int, hidden: Mapping[int, torch.Tensor]) -> None:
        """Hidden states [rows, hidden] of each asked layer for positions start, start + 1, …

        Called once for every position that has become history, in order.
        """

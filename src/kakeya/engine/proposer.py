"""The proposer seam: anything that guesses the next few tokens cheaply.

The verifier computes a guess in the same pass as the token before it and keeps the longest
prefix it would have produced itself, so a proposer can change the speed and never the output.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from kakeya.types import SamplingParams

GREEDY = SamplingParams()


def worth_nothing(tokens: int) -> float:
    return 0.0


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
    answer, or parts of it. It is empty where nothing was predicted. A guess is right with this `chance` if
    those before it were.
    """

    state: DraftState
    tokens: Sequence[int]
    limit: int
    sampling: SamplingParams = GREEDY
    prompt_length: int = 0
    prediction: Sequence[int] = ()
    chance: float = 1.0
    worth: Callable[[int], float] = worth_nothing
    """Seconds that it pays to wait for a guess of so many tokens."""
    patience: float = math.inf
    """Seconds that it pays to prepare for guesses, such as to read the history: what they are thought to save
    in the rest of the answer."""


class WorksAhead:
    """A proposer that goes on guessing by itself, elsewhere, and `propose` gives what has arrived.

    It is asked in every step. It is trusted as much as it deserved in other sessions, and once more whenever
    a generate begins; its silence counts against it.
    """

    def expect(self, request: DraftRequest) -> None:
        """A generate begins: what is in its history can be read while the verifier reads it."""

    def learn(self, addresses: Sequence[str]) -> None:
        """Where all those are that could guess. May be called from any thread."""

    def close(self) -> None:
        """The runtime is closed: give back what is not memory. May be called again."""


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

        Called in order for positions that this session computed and that have become history, once for each.
        What it copied from another session, or brought along from an import, is not shown, nor what it
        computed while no draft was near: `start` leaves a gap.
        """

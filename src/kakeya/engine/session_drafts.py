"""The proposers' part of a session."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from torch import Tensor

from kakeya.engine.draft_length import Acceptance
from kakeya.engine.proposer import DraftState

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass
class Seat:
    """A proposer's place in a session. It has no `state` once the proposer has failed there."""

    name: str
    state: DraftState | None
    acceptance: Acceptance
    guessed_at: int = -(10**9)
    """The engine's step when it last had a guess."""

    def let(self, act: Callable[[DraftState], T]) -> T | None:
        """What the state does. None, and the session goes on without the proposer, where that fails."""
        if self.state is None:
            return None
        try:
            return act(self.state)
        except Exception:
            log.exception("the proposer %s failed; the session goes on without it", self.name)
            self.fail()
            return None

    def fail(self) -> None:
        """Go on without the proposer."""
        state, self.state = self.state, None
        if state is not None:
            with suppress(Exception):  # it has failed already
                state.close()


class SessionDrafts:
    """What the proposers know of one session. `drafted_by` is the seat of the draft in flight."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self.seats = seats
        self.drafted_by = 0

    def fork(self) -> "SessionDrafts":
        return SessionDrafts(
            [
                Seat(seat.name, seat.let(lambda state: state.fork()), replace(seat.acceptance))
                for seat in self.seats
            ]
        )

    def rollback(self, length: int) -> None:
        for seat in self.seats:
            seat.acceptance.watched = None
            seat.let(lambda state: state.rollback(length))

    def export(self) -> Mapping[str, Tensor]:
        return {
            f"{seat.name}.{name}": tensor
            for seat in self.seats
            for name, tensor in (seat.let(lambda state: state.export()) or {}).items()
        }

    def close(self) -> None:
        for seat in self.seats:
            seat.fail()

"""The proposers' part of a session."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor

from kakeya.engine.draft_length import Acceptance
from kakeya.engine.proposer import DraftState


@dataclass
class Seat:
    """A proposer's place in a session. It has no `state` once the proposer has failed there."""

    name: str
    state: DraftState | None
    acceptance: Acceptance

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
                Seat(seat.name, seat.state.fork() if seat.state else None, seat.acceptance.copy())
                for seat in self.seats
            ]
        )

    def rollback(self, length: int) -> None:
        for seat in self.seats:
            seat.acceptance.watched = None
            if seat.state is not None:
                seat.state.rollback(length)

    def export(self) -> Mapping[str, Tensor]:
        return {
            f"{seat.name}.{name}": tensor
            for seat in self.seats
            if seat.state is not None
            for name, tensor in seat.state.export().items()
        }

    def close(self) -> None:
        for seat in self.seats:
            if seat.state is not None:
                seat.state.close()

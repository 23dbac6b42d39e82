"""Everybody holds the same conversation, turn by turn: all have had a turn before the next one begins."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kakeya.bench.contestants import Contestant
from kakeya.bench.contestants_http import Refused
from kakeya.bench.interrupts import Interruption
from kakeya.bench.turns_results import Turn
from kakeya.errors import ConfigError, PeerFailed, RemoteError

WARM_UP = "Hello."

Progress = Callable[[float, str], None]


@dataclass(frozen=True)
class Ends:
    """When the talk is over: whichever comes first. Raises ConfigError for ends that cannot be."""

    turns: int | None = None
    duration_s: float | None = None
    target_history_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and value <= 0:
                raise ConfigError(f"{name.replace('_', '-')} must be above 0, got {value}")
        if self.turns is self.duration_s is self.target_history_tokens is None:
            raise ConfigError("a talk needs an end: turns, duration-s or target-history-tokens")

    def reached(self, elapsed_s: float, turns: int, history: int) -> tuple[float, str]:
        """How far the talk is towards its nearest end, 1 when it is there, and which end that is."""
        ends = {
            "duration": (elapsed_s, self.duration_s),
            "turns": (turns, self.turns),
            "target history": (history, self.target_history_tokens),
        }
        done = {name: value / end for name, (value, end) in ends.items() if end is not None}
        nearest = max(done, key=lambda name: done[name])
        return done[nearest], nearest


@dataclass
class _Seat:
    """A contestant and its turns so far; it leaves after `most_turns`, or when it cannot go on."""

    contestant: Contestant
    most_turns: int | None
    turns: list[Turn] = field(default_factory=list)

    @property
    def has_left(self) -> bool:
        return bool(self.turns) and (len(self.turns) == self.most_turns or self.turns[-1].stopped)

    @property
    def history(self) -> int:
        answers = (turn.answer for turn in reversed(self.turns) if turn.answer is not None)
        last = next(answers, None)
        return 0 if last is None else last.history_tokens


class Talk:
    """The conversation. `most_turns` limits contestants by name; `turns` has everybody's so far."""

    def __init__(
        self, contestants: Sequence[Contestant], interruption: Interruption, most_turns: Mapping[str, int]
    ) -> None:
        self._seats = [_Seat(each, most_turns.get(each.name)) for each in contestants]
        self._interruption = interruption
        self._began = time.perf_counter()
        self.ended_by: str | None = None

    @property
    def turns(self) -> dict[str, Sequence[Turn]]:
        return {seat.contestant.name: seat.turns for seat in self._seats}

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began

    async def warm_up(self) -> None:
        """A short conversation with everybody, uncounted. Raises what a contestant raises."""
        for seat in self._seats:
            await self._interruption.unless_asked(asyncio.to_thread(seat.contestant.say, WARM_UP))
            seat.contestant.forget()
        self._began = time.perf_counter()

    async def hold(
        self, message: Callable[[], str], ends: Ends, progress: Progress, after_turn: Callable[[], object]
    ) -> None:
        """Turn after turn until an end is reached, nobody is left or somebody asks for the end.

        An error is recorded and the talk goes on; who refuses to go on stops there.
        """
        number = 1
        while not self._is_over(ends, number, progress):
            text = message()
            for seat in self._order(number):
                turn = await self._interruption.unless_asked(self._turn(seat, number, text))
                if turn is None:
                    return
                seat.turns.append(turn)
            after_turn()
            number += 1

    def _is_over(self, ends: Ends, number: int, progress: Progress) -> bool:
        history = max(seat.history for seat in self._seats)
        done, nearest = ends.reached(self.elapsed_s, number - 1, history)
        progress(min(1.0, done), f"turn {number:,}, {history:,} tokens")
        if done >= 1.0:
            self.ended_by = nearest
        elif all(seat.has_left for seat in self._seats):
            self.ended_by = "nobody left"
        return self.ended_by is not None or self._interruption.reason is not None

    def _order(self, number: int) -> list[_Seat]:
        """Those still here; each turn begins with another one, so that nobody always comes first."""
        here = [seat for seat in self._seats if not seat.has_left]
        first = number % len(here)
        return [*here[first:], *here[:first]]

    async def _turn(self, seat: _Seat, number: int, text: str) -> Turn:
        began = self.elapsed_s
        try:
            # A thread waits, so that signals are heard meanwhile.
            answer = await asyncio.to_thread(seat.contestant.say, text)
        except (RemoteError, PeerFailed) as error:
            stopped = isinstance(error, Refused)
            return Turn(number, began, None, type(error).__name__, str(error), stopped)
        return Turn(number, began, answer)

"""What `bench engine` measures on each side, and how the sides take their turns. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

# A decode is timed once every session has joined the batch and before the first one leaves it: sessions
# start a step or two apart, so a few rounds at both ends are generated and not counted.
LEAD_IN = 2
LEAD_OUT = 4


@dataclass(frozen=True)
class Case:
    """Either process a prompt of `tokens` tokens in a fresh session, up to its first answer token,
    or decode `steps` tokens in each of `sessions` sessions that hold `history` tokens already.

    `choice` names how tokens are chosen. Only our side chooses any; None is greedy.
    """

    tokens: int = 0
    sessions: int = 1
    history: int = 0
    steps: int = 0
    choice: str | None = None

    @property
    def is_prompt(self) -> bool:
        return self.tokens > 0

    @property
    def label(self) -> str:
        if self.is_prompt:
            return f"prompt of {self.tokens:,}"
        plural = "session" if self.sessions == 1 else "sessions"
        chosen = f", {self.choice}" if self.choice else ""
        return f"decode, {self.sessions} {plural} at history {self.history:,}{chosen}"


class Side(Protocol):
    """One of the programs compared. Speeds are tokens per second, all sessions together."""

    name: str

    def prepare(self, case: Case) -> None:
        """Do the untimed part: hold the case's history, warm up."""
        ...

    def measure(self, case: Case) -> float:
        """One repetition; the prepared history is as it was afterwards."""
        ...

    def release(self) -> None:
        """Forget everything that was prepared."""
        ...


@dataclass(frozen=True)
class Plan:
    """The cases, in groups whose repetitions are interleaved, and how often each is repeated."""

    groups: tuple[tuple[Case, ...], ...]
    repeats: int
    sampled: tuple[Case, ...] = ()
    """One more group, for our side."""

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(case for group in self.groups for case in group)

    @property
    def most_sessions(self) -> int:
        """Sessions that must exist at once: the largest batch, or a group's histories and one copy."""
        return max(
            len({case.history for case in group if not case.is_prompt}) + max(case.sessions for case in group)
            for group in (*self.groups, self.sampled)
            if group
        )

    @property
    def largest_of_each_kind(self) -> tuple[Case, ...]:
        """The longest prompt, the largest batch and the same sampled: what needs the most scratch memory."""
        prompt = max(self.cases, key=lambda case: case.tokens)
        batch = max(self.cases, key=lambda case: (not case.is_prompt, case.sessions, case.history))
        return prompt, batch, *self.sampled[-1:]

    def limited(self, longest_history: int | None, most_sessions: int | None) -> "Plan":
        """What a large model or a short evening allows; None for no limit. Prompts are never left out."""

        def fits(case: Case) -> bool:
            return case.history <= (longest_history or case.history) and case.sessions <= (
                most_sessions or case.sessions
            )

        groups = (tuple(filter(fits, group)) for group in self.groups)
        return Plan(
            tuple(group for group in groups if group), self.repeats, tuple(filter(fits, self.sampled))
        )

    def pieces_of_work(self, sides: int) -> int:
        """How many pieces of work `run_group` will announce over the whole plan."""
        return (len(self.cases) * sides + len(self.sampled)) * (self.repeats + 1)


Speeds = dict[tuple[str, Case], list[float]]


def run_group(
    sides: Sequence[Side], cases: Sequence[Case], repeats: int, announce: Callable[[str], None]
) -> Speeds:
    """Prepare every case on every side, then measure them in turn, `repeats` times over.

    Sides alternate within a case and swap order from one repetition to the next, so that a slow
    spell of the machine falls on both. `announce` is called with each piece of work as it begins.
    """
    speeds: Speeds = {(side.name, case): [] for case in cases for side in sides}
    try:
        for case in cases:
            for side in sides:
                announce(f"{side.name}: preparing {case.label}")
                side.prepare(case)
        for repetition in range(repeats):
            for case in cases:
                for side in sides if repetition % 2 == 0 else tuple(reversed(sides)):
                    announce(f"{side.name}: {case.label}")
                    speeds[side.name, case].append(side.measure(case))
    finally:
        for side in sides:
            side.release()
    return speeds

"""What `bench engine` measures on each side, and how the sides take their turns. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kakeya.types import SamplingParams

# A decode is timed once every session has joined the batch and before the first one leaves it: sessions
# start a step or two apart, so a few rounds at both ends are generated and not counted.
LEAD_IN = 2
LEAD_OUT = 4
# Ways of choosing differ by a few per cent, less than the machine does from second to second. So they take
# many short turns: so many for each turn of another group.
SAMPLED_TURNS = 5
GREEDY = "greedy"
# The ways of choosing tokens that are compared.
CHOICES = {
    GREEDY: SamplingParams(),
    "top-p": SamplingParams(temperature=0.7, top_p=0.95),
    "top-p and penalty": SamplingParams(temperature=0.7, top_p=0.95, repetition_penalty=1.1),
}


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

    def label(self) -> str:
        """All but the steps, in words."""
        if self.tokens:
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


Speeds = dict[tuple[str, Case], list[float]]


@dataclass(frozen=True)
class Plan:
    """The cases, in groups whose repetitions are interleaved. The last group samples, on our side alone."""

    groups: Sequence[tuple[Case, ...]]

    @classmethod
    def full(cls) -> "Plan":
        """What the targets are stated for."""
        alone = tuple(Case(0, 1, history, 32) for history in (64, 1024, 2048, 4096, 16384))
        together = [tuple(Case(0, n, history, 16) for n in (8, 16, 32)) for history in (64, 1024)]
        return cls([(Case(128), Case(512)), alone, *together, _sampled(64, {1: 32, 16: 16, 32: 16})])

    @classmethod
    def quick(cls) -> "Plan":
        """A few seconds of the same kinds of work, to see that everything runs."""
        alone = (Case(0, 1, 16, 4), Case(0, 1, 64, 4))
        return cls([(Case(32),), alone, (Case(0, 2, 16, 4),), _sampled(16, {1: 8, 2: 8})])

    def limited(self, longest_history: int | None, most_sessions: int | None) -> "Plan":
        """What a large model or a short evening allows; None for no limit. Prompts are never left out."""

        def fits(case: Case) -> bool:
            short = longest_history is None or case.history <= longest_history
            return short and (most_sessions is None or case.sessions <= most_sessions)

        return Plan([kept for group in self.groups if (kept := tuple(filter(fits, group)))])

    def sessions_at_once(self) -> int:
        """Sessions that must exist together: a group's histories and its largest batch of copies."""
        return max(
            len({case.history for case in group if not case.tokens}) + max(case.sessions for case in group)
            for group in self.groups
        )

    def largest_of_each_kind(self) -> tuple[Case, Case, Case]:
        """The longest prompt, the largest batch and the same sampled: what needs the most scratch memory."""
        cases = [case for group in self.groups for case in group]
        greedy = [case for case in cases if not case.choice]
        prompt = max(greedy, key=lambda case: case.tokens)
        return prompt, max(greedy, key=lambda case: (case.sessions, case.history)), cases[-1]

    def pieces_of_work(self, sides: int, repeats: int) -> int:
        """How many pieces of work `measure` will announce."""
        return sum(
            len(group) * (1 + SAMPLED_TURNS * repeats if group[0].choice else sides * (1 + repeats))
            for group in self.groups
        )

    def measure(
        self, sides: Sequence[Side], repeats: int, announce: Callable[[str], None]
    ) -> Iterator[Speeds]:
        """All speeds so far, after each group. The first side is ours."""
        speeds: Speeds = {}
        for group in self.groups:
            if group[0].choice:
                speeds |= _in_turns(sides[:1], group, SAMPLED_TURNS * repeats, announce)
            else:
                speeds |= _in_turns(sides, group, repeats, announce)
            yield speeds


def _sampled(history: int, steps: dict[int, int]) -> tuple[Case, ...]:
    """Every choice with so many steps for so many sessions."""
    return tuple(Case(0, count, history, steps[count], choice) for count in steps for choice in CHOICES)


def _in_turns(
    sides: Sequence[Side], cases: Sequence[Case], repeats: int, announce: Callable[[str], None]
) -> Speeds:
    """Prepare every case on every side, then measure them in turn, `repeats` times over.

    Sides alternate within a case, and every other repetition goes backwards, so that a slow spell of the
    machine falls on all. `announce` is called with each piece of work as it begins.
    """
    speeds: Speeds = {(side.name, case): [] for case in cases for side in sides}
    try:
        for case in cases:
            for side in sides:
                announce(f"{side.name}: preparing {case.label()}")
                side.prepare(case)
        for repetition in range(repeats):
            direction = 1 if repetition % 2 == 0 else -1
            for case in cases[::direction]:
                for side in sides[::direction]:
                    announce(f"{side.name}: {case.label()}")
                    speeds[side.name, case].append(side.measure(case))
    finally:
        for side in sides:
            side.release()
    return speeds

"""What `bench engine` measures, and the order in which the sides take their turns. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from kakeya.types import SamplingParams

# A decode is timed once every session has joined the batch and before the first one leaves it: sessions
# start a step or two apart, so a few rounds at both ends are generated and not counted.
LEAD_IN = 2
LEAD_OUT = 4


@dataclass(frozen=True)
class PromptCase:
    """Process a prompt of `tokens` tokens in a fresh session, up to its first answer token."""

    tokens: int

    @property
    def label(self) -> str:
        return f"prompt of {self.tokens:,}"


@dataclass(frozen=True)
class DecodeCase:
    """Decode `steps` tokens in each of `sessions` sessions that hold `history` tokens already."""

    sessions: int
    history: int
    steps: int

    @property
    def label(self) -> str:
        plural = "session" if self.sessions == 1 else "sessions"
        return f"decode, {self.sessions} {plural} at history {self.history:,}"


GREEDY = "greedy"
CHOICES = MappingProxyType(
    {
        GREEDY: SamplingParams(),
        "top-p": SamplingParams(temperature=0.7, top_p=0.95),
        "top-p and penalty": SamplingParams(temperature=0.7, top_p=0.95, repetition_penalty=1.1),
    }
)
"""The ways of choosing tokens that are compared."""


@dataclass(frozen=True)
class SampledCase(DecodeCase):
    """The same, with tokens chosen as `choice` names it. For our side: the peer chooses no tokens."""

    choice: str = GREEDY

    @property
    def label(self) -> str:
        return f"{super().label}, {self.choice}"


Case = PromptCase | DecodeCase


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
    sampled: tuple[SampledCase, ...] = ()
    """One more group, for our side."""

    @property
    def cases(self) -> tuple[Case, ...]:
        return tuple(case for group in self.groups for case in group)

    @property
    def most_sessions(self) -> int:
        """Sessions that must exist at once: the largest batch, or a group's histories and one copy."""
        return max(self._sessions_of(group) for group in (*self.groups, self.sampled))

    @property
    def largest_of_each_kind(self) -> tuple[Case, ...]:
        """The longest prompt, the largest batch and the same sampled: what needs the most scratch memory."""
        prompts = [case for case in self.cases if isinstance(case, PromptCase)]
        decodes = [case for case in self.cases if isinstance(case, DecodeCase)]
        return (
            max(prompts, key=lambda case: case.tokens),
            max(decodes, key=lambda case: (case.sessions, case.history)),
            *self.sampled[-1:],
        )

    @staticmethod
    def _sessions_of(group: Sequence[Case]) -> int:
        decodes = [case for case in group if isinstance(case, DecodeCase)]
        histories = len({case.history for case in decodes})
        return histories + max((case.sessions for case in decodes), default=1)


def limited(plan: Plan, longest_history: int | None, most_sessions: int | None) -> Plan:
    """What of it a large model or a short evening allows; None for no limit. Prompts are never left out."""

    def fits(case: Case) -> bool:
        if isinstance(case, PromptCase):
            return True
        return case.history <= (longest_history or case.history) and case.sessions <= (
            most_sessions or case.sessions
        )

    groups = (tuple(filter(fits, group)) for group in plan.groups)
    sampled = tuple(case for case in plan.sampled if fits(case))
    return Plan(tuple(group for group in groups if group), plan.repeats, sampled)


def full_plan(repeats: int) -> Plan:
    """What the targets are stated for."""
    return _plan(
        prompts=(128, 512),
        histories=(64, 1024, 2048, 4096, 16384),
        sessions=(8, 16, 32),
        shared_histories=(64, 1024),
        steps=(32, 16),
        sampled_sessions=(1, 16, 32),
        repeats=repeats,
    )


def quick_plan(repeats: int) -> Plan:
    """A few seconds of the same kinds of work, to see that everything runs."""
    return _plan(
        prompts=(32,),
        histories=(16, 64),
        sessions=(2,),
        shared_histories=(16,),
        steps=(4, 4),
        sampled_sessions=(1, 2),
        repeats=repeats,
    )


def _plan(
    *,
    prompts: Sequence[int],
    histories: Sequence[int],
    sessions: Sequence[int],
    shared_histories: Sequence[int],
    steps: tuple[int, int],
    sampled_sessions: Sequence[int],
    repeats: int,
) -> Plan:
    alone, together = steps
    groups: list[tuple[Case, ...]] = [
        tuple(PromptCase(tokens) for tokens in prompts),
        tuple(DecodeCase(1, history, alone) for history in histories),
    ]
    groups += [
        tuple(DecodeCase(count, history, together) for count in sessions) for history in shared_histories
    ]
    sampled = tuple(
        SampledCase(count, histories[0], 2 * (alone if count == 1 else together), choice)
        for count in sampled_sessions
        for choice in CHOICES
    )
    return Plan(tuple(groups), repeats, sampled)


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


def announcements(plan: Plan, sides: int) -> int:
    """How many pieces of work `run_group` will announce over the whole plan."""
    return (len(plan.cases) * sides + len(plan.sampled)) * (plan.repeats + 1)

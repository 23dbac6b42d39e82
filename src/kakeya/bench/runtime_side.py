"""Our side of `bench engine`: the runtime, called in this process."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kakeya.bench.cases import CHOICES, GREEDY, LEAD_IN, LEAD_OUT, Case
from kakeya.bench.text import stretch
from kakeya.types import Event, TokenEvent

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

OURS = "kakeya"


class RuntimeSide:
    """Histories are computed once and forked for every repetition.

    Decoding never stops early and is greedy unless a case says otherwise. The choice of tokens and the
    delivery of events are part of the time.
    """

    name = OURS

    def __init__(self, runtime: "Runtime", text: Sequence[int]) -> None:
        self._runtime = runtime
        self.text = text
        self._held: dict[int, str] = {}

    def prepare(self, case: Case) -> None:
        if not case.tokens and case.history not in self._held:
            self._held[case.history] = self._session_with(case.history)
            # Appended tokens wait until a generate computes them.
            list(self._runtime.generate(self._held[case.history], 1))
        self.measure(case)

    def measure(self, case: Case) -> float:
        if case.tokens:
            sessions = [self._session_with(case.tokens)]
            return case.tokens / self._seconds(case, sessions, rounds=1, counted=(0, 1))
        sessions = [self._runtime.fork(self._held[case.history])[0] for _ in range(case.sessions)]
        rounds, counted = LEAD_IN + case.steps + LEAD_OUT, (LEAD_IN, LEAD_IN + case.steps)
        return case.sessions * case.steps / self._seconds(case, sessions, rounds, counted)

    def release(self) -> None:
        for session_id in self._held.values():
            self._runtime.close_session(session_id)
        self._held.clear()

    def _session_with(self, tokens: int) -> str:
        session_id = self._runtime.create_session(client_label="bench", eos_token_ids=[])
        self._runtime.append(session_id, stretch(self.text, 0, tokens))
        return session_id

    def _seconds(self, case: Case, sessions: Sequence[str], rounds: int, counted: tuple[int, int]) -> float:
        """From the end of one round to the end of another; round 0 is the start. The sessions are closed."""
        sampling = CHOICES[case.choice or GREEDY]
        try:
            began = time.perf_counter()
            streams = [
                iter(self._runtime.generate(session_id, rounds, replace(sampling, seed=seed)))
                for seed, session_id in enumerate(sessions)
            ]
            stamps = [began, *round_times(streams, rounds)]
            return stamps[counted[1]] - stamps[counted[0]]
        finally:
            for session_id in sessions:
                self._runtime.close_session(session_id)


def round_times(streams: Sequence[Iterator[Event]], rounds: int) -> list[float]:
    """When each round was complete: every stream had delivered one more token.

    One reader takes from all streams in turn, so that reading costs one thread, not one a session.
    """
    stamps = []
    for _ in range(rounds):
        for events in streams:
            next(event for event in events if isinstance(event, TokenEvent))
        stamps.append(time.perf_counter())
    for events in streams:
        list(events)
    return stamps

"""Our side of `bench engine`: the runtime called directly, as a program in the same process would."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from kakeya.bench.plan import CHOICES, GREEDY, LEAD_IN, LEAD_OUT, Case, DecodeCase, PromptCase, SampledCase
from kakeya.bench.prose import stretch
from kakeya.runtime import Runtime
from kakeya.types import Event, TokenEvent


class RuntimeSide:
    """Measures a runtime. Histories are computed once and forked for every repetition.

    Decoding never stops early and is greedy unless a case says otherwise. The choice of tokens and the
    delivery of events are part of the time.
    """

    name = "kakeya"

    def __init__(self, runtime: Runtime, text: Sequence[int]) -> None:
        self._runtime = runtime
        self.text = text
        self._held: dict[int, str] = {}

    def prepare(self, case: Case) -> None:
        if isinstance(case, DecodeCase) and case.history not in self._held:
            self._held[case.history] = self._session_with(case.history)
        self.measure(case)

    def measure(self, case: Case) -> float:
        return self._prompt(case) if isinstance(case, PromptCase) else self._decode(case)

    def release(self) -> None:
        for session_id in self._held.values():
            self._runtime.close_session(session_id)
        self._held.clear()

    def _session_with(self, history: int) -> str:
        session_id = self._runtime.create_session(client_label="bench", eos_token_ids=[])
        self._runtime.append(session_id, stretch(self.text, 0, history))
        # Appended tokens wait until a generate computes them.
        for _ in self._runtime.generate(session_id, 1):
            pass
        return session_id

    def _prompt(self, case: PromptCase) -> float:
        session_id = self._runtime.create_session(client_label="bench", eos_token_ids=[])
        try:
            self._runtime.append(session_id, stretch(self.text, 0, case.tokens))
            began = time.perf_counter()
            events = iter(self._runtime.generate(session_id, 1))
            _next_token(events)
            seconds = time.perf_counter() - began
            _drain(events)
            return case.tokens / seconds
        finally:
            self._runtime.close_session(session_id)

    def _decode(self, case: DecodeCase) -> float:
        copies = [self._runtime.fork(self._held[case.history]) for _ in range(case.sessions)]
        try:
            rounds = LEAD_IN + case.steps + LEAD_OUT
            sampling = CHOICES[case.choice if isinstance(case, SampledCase) else GREEDY]
            streams = [
                iter(self._runtime.generate(copy, rounds, replace(sampling, seed=seed)))
                for seed, copy in enumerate(copies)
            ]
            stamps = _round_times(streams, rounds)
            seconds = stamps[LEAD_IN + case.steps - 1] - stamps[LEAD_IN - 1]
            return case.sessions * case.steps / seconds
        finally:
            for copy in copies:
                self._runtime.close_session(copy)


def _round_times(streams: Sequence[Iterator[Event]], rounds: int) -> list[float]:
    """When each round was complete: every stream had delivered one more token.

    One reader takes from all streams in turn, so that reading costs one thread, not one a session.
    """
    stamps = []
    for _ in range(rounds):
        for events in streams:
            _next_token(events)
        stamps.append(time.perf_counter())
    for events in streams:
        _drain(events)
    return stamps


def _next_token(events: Iterator[Event]) -> None:
    next(event for event in events if isinstance(event, TokenEvent))


def _drain(events: Iterator[Event]) -> None:
    for _ in events:
        pass

"""Many sessions at once through the runtime: streams started, read to the end, timed.

One thread reads every stream every few milliseconds. A server's event loop does the same, so it is part of
what is measured.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from kakeya.runtime import Runtime
from kakeya.types import DoneEvent, FailedEvent, SamplingParams, TokenEvent

_POLL_S = 0.003

GREEDY = SamplingParams()


@dataclass(frozen=True)
class Tally:
    """What was read of all streams together. `seconds` is from the first call to the last token, `speed` is
    tokens a second while all sessions generated. `proposed` and `accepted` are drafted tokens."""

    counts: Sequence[int]
    seconds: float
    speed: float | None
    proposed: int = 0
    accepted: int = 0

    @property
    def whole_speed(self) -> float:
        return sum(self.counts) / self.seconds


def speed_between(reads: Sequence[tuple[float, int]]) -> float | None:
    """Tokens a second between the first and the last of these times; None if that was no time at all."""
    if len(reads) < 2:
        return None
    (since, before), (until, after) = reads[0], reads[-1]
    return (after - before) / (until - since) if until > since and after > before else None


def generate_all(
    runtime: Runtime,
    session_ids: Sequence[str],
    tokens: int,
    sampling: SamplingParams = GREEDY,
    kept: Sequence[list[TokenEvent]] | None = None,
) -> Tally:
    """Let every session generate so many tokens at once, each with its number as its seed, and read them all.
    `kept` gets the tokens of each session. Raises the error of a stream that failed."""
    numbers, counts = range(len(session_ids)), [0] * len(session_ids)
    began = now = time.perf_counter()
    while_all: list[tuple[float, int]] = []
    proposed = accepted = 0
    # Each call waits until the engine has finished its step: together they wait no longer than one does.
    with ThreadPoolExecutor(len(session_ids)) as callers:
        seeded = [replace(sampling, seed=number) for number in numbers]
        started = callers.map(lambda n: runtime.generate(session_ids[n], tokens, seeded[n]), numbers)
        streams = dict(zip(numbers, started, strict=True))
    while streams:
        for number, stream in list(streams.items()):
            for event in stream.poll_all():
                if isinstance(event, TokenEvent):
                    counts[number] += 1
                    if kept is not None:
                        kept[number].append(event)
                elif isinstance(event, FailedEvent):
                    raise event.error
                elif isinstance(event, DoneEvent):
                    proposed += event.proposed_draft_tokens
                    accepted += event.accepted_draft_tokens
                    del streams[number]
        now = time.perf_counter()
        if len(streams) == len(counts) and all(counts):
            while_all.append((now, sum(counts)))
        time.sleep(_POLL_S)
    return Tally(counts, now - began, speed_between(while_all), proposed, accepted)


def generated(
    runtime: Runtime, session_ids: Sequence[str], tokens: int, sampling: SamplingParams = GREEDY
) -> list[list[TokenEvent]]:
    """What each session generates, all at once."""
    kept: list[list[TokenEvent]] = [[] for _ in session_ids]
    generate_all(runtime, session_ids, tokens, sampling, kept)
    return kept


@contextmanager
def sessions(runtime: Runtime, histories: Sequence[Sequence[int]]) -> Iterator[list[str]]:
    """A session for each history, which is not computed yet. No token ends it. Closed afterwards."""
    session_ids: list[str] = []
    try:
        for history in histories:
            session_ids.append(runtime.create_session(eos_token_ids=()))
            runtime.append(session_ids[-1], history)
        yield session_ids
    finally:
        for session_id in session_ids:
            runtime.close_session(session_id)

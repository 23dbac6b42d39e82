"""Many sessions at once through the runtime: streams started, read to the end, timed.

One thread reads every stream every few milliseconds. That is what a server's event loop does, too, and it is
part of what is measured.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from kakeya.runtime import Runtime
from kakeya.types import DoneEvent, FailedEvent, SamplingParams, TokenEvent

POLL_S = 0.003

# Both by the session's number.
Sampling = Callable[[int], SamplingParams]
Heard = Callable[[int, TokenEvent], object]


def greedy(number: int) -> SamplingParams:
    return SamplingParams()


def forget(number: int, event: TokenEvent) -> None:
    """What a server does with a token once it is sent: a quarter of a million of them would only slow it."""


@dataclass
class Tally:
    """What has been read of all streams together.

    Speed counts from when every session has begun to when the first one has ended: while all generate.
    """

    counts: list[int]
    """Tokens of each session."""
    started_at: float = field(default_factory=time.perf_counter)
    ended_at: float = 0.0
    all_at: list[tuple[float, int]] = field(default_factory=list)
    """When all generated, and how many tokens there were."""

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def seconds(self) -> float:
        """From the first call to the last token."""
        return self.ended_at - self.started_at

    @property
    def whole_speed(self) -> float:
        return self.tokens / self.seconds

    @property
    def speed(self) -> float | None:
        """Tokens a second while all generated; None when that was no time at all."""
        if len(self.all_at) < 2:
            return None
        (since, before), (until, after) = self.all_at[0], self.all_at[-1]
        return (after - before) / (until - since) if until > since and after > before else None

    def note(self, now: float, ended: int) -> None:
        """All streams have been read once more; so many have ended."""
        if ended == 0 and all(self.counts):
            self.all_at.append((now, self.tokens))
        self.ended_at = now


def generate_all(
    runtime: Runtime,
    session_ids: Sequence[str],
    tokens: int,
    sampling: Sampling = greedy,
    heard: Heard = forget,
) -> Tally:
    """Have every session generate so many tokens at once, and read them all; `heard` gets each.

    Raises the error of a stream that failed.
    """
    tally = Tally([0] * len(session_ids))
    numbers = range(len(session_ids))
    # Each call waits for the engine to look up from its step: all together wait no longer than one does.
    with ThreadPoolExecutor(len(session_ids)) as callers:
        started = callers.map(lambda n: runtime.generate(session_ids[n], tokens, sampling(n)), numbers)
        streams = dict(zip(numbers, started, strict=True))
    while streams:
        for number, stream in list(streams.items()):
            for event in stream.poll_all():
                if isinstance(event, TokenEvent):
                    tally.counts[number] += 1
                    heard(number, event)
                elif isinstance(event, FailedEvent):
                    raise event.error
                elif isinstance(event, DoneEvent):
                    del streams[number]
        tally.note(time.perf_counter(), len(session_ids) - len(streams))
        time.sleep(POLL_S)
    return tally


def generated(
    runtime: Runtime, session_ids: Sequence[str], tokens: int, sampling: Sampling = greedy
) -> list[list[TokenEvent]]:
    """The same, and what each session generated."""
    kept: list[list[TokenEvent]] = [[] for _ in session_ids]
    generate_all(runtime, session_ids, tokens, sampling, lambda number, event: kept[number].append(event))
    return kept


@contextmanager
def sessions(runtime: Runtime, histories: Sequence[Sequence[int]]) -> Iterator[list[str]]:
    """A session for each history, which is not computed yet; no token ends it. Closed afterwards."""
    session_ids: list[str] = []
    try:
        for history in histories:
            session_ids.append(runtime.create_session(eos_token_ids=()))
            runtime.append(session_ids[-1], history)
        yield session_ids
    finally:
        for session_id in session_ids:
            runtime.close_session(session_id)

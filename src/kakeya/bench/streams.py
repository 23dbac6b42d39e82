"""Streams of a runtime in this process: what they say, when their tokens come, and streams that go on.

What else a stream brings, such as its end, is no token and counts for nothing here.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

from kakeya.types import TokenEvent

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

_FOR_EVER = 10**6


def tokens_of(events: Iterable[object]) -> list[int]:
    """The tokens that a stream brought."""
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


def arrivals(stream: Iterable[object]) -> list[float]:
    """When its tokens came."""
    return [time.perf_counter() for event in stream if isinstance(event, TokenEvent)]


def all_arrivals(streams: Sequence[Iterable[object]]) -> list[list[float]]:
    """When the tokens of each came, with a reader for each."""
    with ThreadPoolExecutor(len(streams)) as pool:
        return list(pool.map(arrivals, streams))


def gaps(times: Iterable[float]) -> list[float]:
    """Seconds from each to the next."""
    return [later - earlier for earlier, later in pairwise(times)]


@contextmanager
def session(runtime: "Runtime", token_ids: Sequence[int] = (), *, recall: int = 0) -> Iterator[str]:
    """A session that holds these tokens, and whose answers end by their length alone."""
    session_id = runtime.create_session(eos_token_ids=(), recall_tokens=recall)
    try:
        if token_ids:
            runtime.append(session_id, token_ids)
        yield session_id
    finally:
        runtime.close_session(session_id)


GapsBetween = Callable[[float, float], list[float]]


@contextmanager
def streaming(runtime: "Runtime", prompts: Sequence[Sequence[int]]) -> Iterator[GapsBetween]:
    """An answer to each prompt that goes on until it is left.

    Once they are over, the function gives the gaps between tokens that began between two times of
    `time.perf_counter`. Raises what a stream broke with.
    """
    with ExitStack() as stack:
        sessions = [stack.enter_context(session(runtime, prompt)) for prompt in prompts]
        pool = stack.enter_context(ThreadPoolExecutor(len(prompts)))
        streams = [runtime.generate(session_id, _FOR_EVER) for session_id in sessions]
        readers = [pool.submit(arrivals, stream) for stream in streams]
        try:
            yield lambda since, until: [
                later - earlier
                for reader in readers
                for earlier, later in pairwise(reader.result())
                if since <= earlier <= until
            ]
        finally:
            for stream in streams:
                stream.cancel()
        for reader in readers:
            reader.result()

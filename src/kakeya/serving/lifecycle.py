"""A server process's life: listen, load, serve, drain on a signal or when the engine dies.

Its front ends live it together.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, TypeVar

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Of a shutdown's grace, what is kept for telling clients that it is over.
_LAST_WORDS_S = 1.0


class Served(Protocol):
    """What front ends serve: a runtime, or proposers."""

    @property
    def ended(self) -> "Future[str | None]":
        """Done when it has ended: None after `close`, the reason if it died before."""
        ...

    def check_alive(self) -> None:
        """Raises Unavailable when it has died."""
        ...

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new work and wait for what runs; True when all of it ended in time."""
        ...

    def close(self) -> None:
        """End it. What still runs is cut off."""
        ...


S = TypeVar("S", bound=Served)
S_contra = TypeVar("S_contra", bound=Served, contravariant=True)


class FrontEnd(Protocol[S_contra]):
    """One way to reach what is served: gRPC or HTTP. Used from one event loop."""

    @property
    def address(self) -> str:
        """Where it listens: the real port, when port 0 was asked for."""
        ...

    async def start(self) -> None:
        """Listen. Calls are told to come later. Raises ConfigError when that cannot be."""
        ...

    async def open(self, served: S_contra, /) -> None:
        """Serve from now on."""
        ...

    async def refuse(self) -> None:
        """Say from now on that new work is not taken; what runs goes on."""
        ...

    def interrupt(self) -> None:
        """End every generate now and tell its client why."""
        ...

    async def stop(self, grace_s: float) -> None:
        """Stop listening and, once their last words are out or the grace is over, end the connections."""
        ...


async def drain(fronts: Sequence[FrontEnd[S]], served: S | None, grace_s: float) -> bool:
    """Refuse new work, let what runs end within the grace, tell the rest, close everything.

    True when nothing had to be interrupted.
    """
    last_words = min(_LAST_WORDS_S, grace_s / 5)
    for front in fronts:
        await front.refuse()
    finished = served is None or await asyncio.to_thread(served.drain, grace_s - last_words)
    if not finished:
        for front in fronts:
            front.interrupt()
    # A call that meets gRPC's own shutdown is told CANCELLED: let the next ones of clients that were
    # waiting for us come, and be told UNAVAILABLE.
    await asyncio.sleep(last_words / 4)
    await asyncio.gather(*(front.stop(last_words * 3 / 4) for front in fronts))
    if served is not None:
        await asyncio.to_thread(served.close)
    return finished


async def serve(
    fronts: Sequence[FrontEnd[S]],
    load: Callable[[], S],
    announce: Callable[[S], None],
    grace_s: float,
) -> None:
    """Listen, load what is served in a thread, announce it, serve until a signal or its death, drain.

    The first SIGTERM or SIGINT drains; the second ends the process at once. Raises what
    listening and loading raise, and Unavailable when what is served has died.
    """
    await _start(fronts)
    stop = _first_signal(asyncio.get_running_loop())
    loading = asyncio.create_task(asyncio.to_thread(load))
    await asyncio.wait((loading, stop), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        log.info("signal while loading: leaving")
        await drain(fronts, None, 0)
        _leave(0)  # nothing to lose yet, and a load cannot be interrupted
    try:
        served = loading.result()
    except BaseException:
        await drain(fronts, None, 0)
        raise
    for front in fronts:
        await front.open(served)
    announce(served)
    await asyncio.wait((stop, asyncio.wrap_future(served.ended)), return_when=asyncio.FIRST_COMPLETED)
    if stop.done():
        log.info("signal %s: draining for at most %g s", stop.result().name, grace_s)
    finished = await drain(fronts, served, grace_s)
    served.check_alive()
    log.info("drained" if finished else "drained; some generates were interrupted")


async def _start(fronts: Sequence[FrontEnd[S]]) -> None:
    """Listen at all of them, or at none."""
    for number, front in enumerate(fronts):
        try:
            await front.start()
        except BaseException:
            await drain(fronts[:number], None, 0)
            raise


def _first_signal(loop: asyncio.AbstractEventLoop) -> "asyncio.Future[signal.Signals]":
    """Resolves with the first signal. The second one never returns."""
    first: asyncio.Future[signal.Signals] = loop.create_future()

    def received(number: signal.Signals) -> None:
        if first.done():
            _leave(128 + number)
        first.set_result(number)

    for number in _SIGNALS:
        loop.add_signal_handler(number, received, number)
    return first


def _leave(status: int) -> None:
    """End the process without waiting for anything."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

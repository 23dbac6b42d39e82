"""A server process's life: listen, load, serve, drain on a signal or when the engine dies.

Its front ends live it together.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # torch takes a second to import, and the servers listen before that
    from kakeya.runtime import Runtime

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# Of a shutdown's grace, what is kept for telling clients that it is over.
_LAST_WORDS_S = 1.0


class FrontEnd(Protocol):
    """One way to reach the runtime: gRPC or HTTP. Used from one event loop."""

    @property
    def address(self) -> str:
        """Where it listens: the real port, when port 0 was asked for."""
        ...

    async def start(self) -> None:
        """Listen. Calls are told to come later. Raises ConfigError when that cannot be."""
        ...

    async def open(self, runtime: "Runtime") -> None:
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


async def drain(fronts: Sequence[FrontEnd], runtime: "Runtime | None", grace_s: float) -> bool:
    """Refuse new work, let what runs end within the grace, tell the rest, close everything.

    True when nothing had to be interrupted.
    """
    last_words = min(_LAST_WORDS_S, grace_s / 5)
    for front in fronts:
        await front.refuse()
    finished = runtime is None or await asyncio.to_thread(runtime.drain, grace_s - last_words)
    if not finished:
        for front in fronts:
            front.interrupt()
    # A call that meets gRPC's own shutdown is told CANCELLED: let the next ones of clients that were
    # waiting for us come, and be told UNAVAILABLE.
    await asyncio.sleep(last_words / 4)
    await asyncio.gather(*(front.stop(last_words * 3 / 4) for front in fronts))
    if runtime is not None:
        await asyncio.to_thread(runtime.close)
    return finished


async def serve(
    fronts: Sequence[FrontEnd],
    load: Callable[[], "Runtime"],
    announce: Callable[["Runtime"], None],
    grace_s: float,
) -> None:
    """Listen, load the runtime in a thread, announce it, serve until a signal or the engine's death, drain.

    The first SIGTERM or SIGINT drains; the second ends the process at once. Raises what
    listening and loading raise, and Unavailable when the engine has died.
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
        runtime = loading.result()
    except BaseException:
        await drain(fronts, None, 0)
        raise
    for front in fronts:
        await front.open(runtime)
    announce(runtime)
    await asyncio.wait((stop, asyncio.wrap_future(runtime.ended)), return_when=asyncio.FIRST_COMPLETED)
    if stop.done():
        log.info("signal %s: draining for at most %g s", stop.result().name, grace_s)
    finished = await drain(fronts, runtime, grace_s)
    runtime.check_alive()
    log.info("drained" if finished else "drained; some generates were interrupted")


async def _start(fronts: Sequence[FrontEnd]) -> None:
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

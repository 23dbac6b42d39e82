"""A server's life in its own process: listen, load, serve, drain on a signal."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from kakeya.config import ServerConfig
from kakeya.grpc_server.server import Server

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(
    config: ServerConfig, load: Callable[[], "Runtime"], announce: Callable[["Runtime", str], None]
) -> None:
    """Listen, load the runtime in a thread, announce it with the address, serve until a signal, drain.

    The first SIGTERM or SIGINT drains; the second ends the process at once. Raises what
    listening and loading raise.
    """
    server = Server(config)
    await server.start()
    stop = _first_signal(asyncio.get_running_loop())
    loading = asyncio.create_task(asyncio.to_thread(load))
    await asyncio.wait((loading, stop), return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        log.info("signal while loading: leaving")
        await server.drain(0)
        _leave(0)  # nothing to lose yet, and a load cannot be interrupted
    try:
        runtime = loading.result()
    except BaseException:
        await server.drain(0)
        raise
    await server.open(runtime)
    announce(runtime, server.address)
    log.info("signal %s: draining for at most %g s", (await stop).name, config.shutdown_grace_s)
    finished = await server.drain()
    log.info("drained" if finished else "drained; some generates were interrupted")


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

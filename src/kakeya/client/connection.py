"""One channel to a server: calls with a key, a deadline and retries."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf.message import Message
from grpc.aio import AioRpcError

from kakeya.client.failures import translated
from kakeya.dialing import MODEL_KEY, TLS, Keepalive, Retry, channel_options
from kakeya.errors import ConfigError, Conflict, HistoryMismatch, KakeyaError, Restarting, Unavailable
from kakeya.wire import runtime_pb2_grpc

# Its own, so that pauses neither follow a program's seed nor disturb it.
_JITTER = random.Random()
# Between questions to a server that says that it restarts. Nobody is in a hurry, and there may be many of us.
_RESTART_PAUSE_S = 1.0


class Attempts:
    """Counts the tries of one call and pauses between them. All must be over after `timeout` seconds.

    `after_a_break` is whether one ended without telling what the server did. `pause` waits so many seconds,
    or raises when there will be no other try.
    """

    def __init__(
        self,
        retry: Retry,
        timeout: float | None,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._retry = retry
        self._pause = pause
        self._end = None if timeout is None else time.monotonic() + timeout
        self._failed = 0
        self.after_a_break = False

    def time_left(self) -> float | None:
        """Seconds, never negative; None for no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def progressed(self) -> None:
        """The work went on: the next failure is a first one."""
        self._failed = 0

    async def pause_or_raise(self, error: KakeyaError, *, conflict_passes: bool = False) -> None:
        """Wait before the next try. Raises `error` when another try is useless or there is no time for it.
        A server is waited for as long as it says that it restarts.

        `conflict_passes`: the session is busy only with work that is being stopped.
        """
        busy = isinstance(error, Conflict) and not isinstance(error, HistoryMismatch)
        if not (isinstance(error, Unavailable) or (busy and conflict_passes)):
            raise error
        self.after_a_break |= isinstance(error, Unavailable)
        restarts = isinstance(error, Restarting)
        self._failed = 1 if restarts else self._failed + 1
        delay = self._delay(_RESTART_PAUSE_S if restarts else self._retry.first_delay)
        left = self.time_left()
        if self._failed >= self._retry.attempts or (left is not None and delay >= left):
            raise error
        await self._pause(delay)

    def _delay(self, first: float) -> float:
        longest = min(self._retry.longest_delay, first * 2.0 ** (self._failed - 1))
        return longest * _JITTER.uniform(0.5, 1.0)


class Connection:
    """Opens its channel at the first call, on the event loop that makes it, and keeps to that loop."""

    def __init__(
        self,
        target: str,
        api_key: str | None,
        model: str | None,
        tls: TLS | None,
        timeout: float | None,
        retry: Retry,
        keepalive: Keepalive,
    ) -> None:
        self._target = target
        self._credentials = None if tls is None else tls.credentials()
        self._options = channel_options(retry, keepalive)
        self.timeout = timeout
        self._retry = retry
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None
        self._closed = asyncio.Event()
        self.metadata = _metadata(api_key, model)

    async def opened(self) -> Any:
        """The calls. Raises RuntimeError once closed. Who gets Unavailable tries again, and here in vain."""
        if self._closed.is_set():
            await asyncio.sleep(0)  # who tries again all the same lets others go on
            raise RuntimeError("this client is closed: make a new one")
        if self._channel is None:
            self._channel = self._open()
            self._stub = runtime_pb2_grpc.RuntimeServiceStub(self._channel)
        return self._stub

    def attempts(self, timeout: float | None) -> Attempts:
        return Attempts(self._retry, timeout, self._pause)

    async def call(
        self,
        name: str,
        request: Message | Sequence[Message],
        *,
        attempts: Attempts | None = None,
        conflict_passes: bool = False,
    ) -> Any:
        """The reply to one request, or to several in a row, tried until it is answered or the time is over.

        Only for what may be repeated: reads, and calls with a request id. Raises the error the server meant.
        """
        method, attempts = getattr(await self.opened(), name), attempts or self.attempts(self.timeout)
        while True:
            try:
                return await method(request, timeout=attempts.time_left(), metadata=self.metadata)
            except AioRpcError as error:
                await attempts.pause_or_raise(translated(error), conflict_passes=conflict_passes)
            except asyncio.CancelledError:
                self.raise_if_closed()
                raise

    def raise_if_closed(self) -> None:
        """Tell a call that `close` ended from one whose task was cancelled. Raises Unavailable."""
        task = asyncio.current_task()
        if self._closed.is_set() and (task is None or task.cancelling() == 0):
            raise Unavailable("this client was closed during the call")

    async def close(self) -> None:
        """Close the channel; running calls end. May be called again."""
        self._closed.set()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _pause(self, seconds: float) -> None:
        """Wait before the next try. Raises Unavailable when the client is closed meanwhile."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), seconds)
        self.raise_if_closed()

    def _open(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._target, options=self._options)
        return grpc.aio.secure_channel(self._target, self._credentials, options=self._options)


def _metadata(api_key: str | None, model: str | None) -> tuple[tuple[str, str], ...]:
    """What every call carries besides its request."""
    key = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
    if model is None:
        return key
    if not (model and model.isascii() and model.isprintable()):
        raise ConfigError(f"model must be printable ASCII, got {model!r}")
    return (*key, (MODEL_KEY, model))

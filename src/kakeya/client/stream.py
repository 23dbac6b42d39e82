"""One generate as a stream: tokens in order, none twice, through broken connections.

A broken stream leaves the server with exactly the tokens it had sent. Asking again with the same request id
replays them, so what got lost on the way is found, and a new request for the rest goes on from there: each
token's randomness depends only on the seed and its position, so the joint cannot be seen.
"""

import asyncio
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import cached_property
from typing import Any, Generic, Self, TypeVar

from grpc import StatusCode
from grpc.aio import AioRpcError

from kakeya.client.connection import Attempts, Connection
from kakeya.client.failures import translated
from kakeya.client.requests import new_request_id
from kakeya.client.values import GenerateResult, Token, generate_result, joined, token
from kakeya.errors import DeadlineExceeded, RemoteError
from kakeya.types import StopReason
from kakeya.wire import runtime_pb2 as pb

T = TypeVar("T")

_NEVER_SENT = GenerateResult(StopReason.CANCELLED, 0, 0.0, 0.0, 0, 0, 0, 0)


class Generation:
    """The state of one generate, shared by its session and its reader.

    `ended`: the server has nothing more to do for it. `result`: how it ended, if the server said so.
    """

    def __init__(self, connection: Connection, request: pb.GenerateRequest, timeout: float | None) -> None:
        self.request = request
        self.cancelled = False
        self.ended = False
        self.result: GenerateResult | None = None
        self.reader: weakref.ref[AsyncStream[Any]] | None = None
        self._connection = connection
        self._timeout = timeout
        self._call: Any = None
        self._left = False
        self._received = 0
        self._dropped = 0
        self._earlier: GenerateResult | None = None

    @property
    def is_abandoned(self) -> bool:
        """Whether its reader has left, which the server may not have noticed yet."""
        reader_is_gone = self.reader is not None and self.reader() is None
        return not self.ended and (self.cancelled or self._left or reader_is_gone)

    def cancel(self) -> None:
        """Stop the work. The reader then gets what the server had sent, and the result."""
        self.cancelled = True
        self.stop()

    def stop(self) -> None:
        """End the call that is running, if one is."""
        if self._call is not None:
            self._call.cancel()

    @asynccontextmanager
    async def within_its_time(self) -> AsyncIterator[None]:
        """For what must be done before it, as part of its time. Raises DeadlineExceeded when that is over."""
        try:
            async with asyncio.timeout(self._attempts.time_left()):
                yield
        except DeadlineExceeded:
            raise  # a call's own
        except TimeoutError:
            over = DeadlineExceeded("the time for this call is over")
            over.status = StatusCode.DEADLINE_EXCEEDED
            raise over from None

    @cached_property
    def _attempts(self) -> Attempts:
        """Their time runs from the first use, when the reader asks for something."""
        return self._connection.attempts(self._timeout)

    async def tokens(self, *, conflict_passes: bool) -> AsyncGenerator[Token, None]:
        """The tokens, each once, over as many calls as it takes. `conflict_passes` as in `Connection.call`.

        Raises the error the server meant; a reader who leaves ends the call.
        """
        attempts = self._attempts
        try:
            while self.result is None:
                try:
                    async with aclosing(self._one_call(attempts)) as items:
                        async for item in items:
                            yield item
                except AioRpcError as error:
                    passes = conflict_passes or self.cancelled or attempts.after_a_break
                    await attempts.pause_or_raise(translated(error), conflict_passes=passes)
        finally:
            self._left = True
            self.stop()

    async def _one_call(self, attempts: Attempts) -> AsyncGenerator[Token, None]:
        """The tokens of one call that are new. Sets `result` when they were the last ones."""
        if self.cancelled and self._received == 0:
            # Nothing came yet, and asking again could start work that is no longer wanted.
            self.result = self._earlier or _NEVER_SENT
            return
        stub = await self._connection.opened()
        self._call = stub.Generate(
            self.request, timeout=attempts.time_left(), metadata=self._connection.metadata
        )
        seen, done = 0, None
        try:
            async for event in self._call:
                for message in _tokens(event):
                    seen += 1
                    if seen > self._received:
                        self._received = seen
                        attempts.progressed()
                        yield token(message)
                if event.HasField("truncated"):
                    self._dropped = event.truncated.dropped_token_count
                elif event.HasField("done"):
                    done = event.done
        except asyncio.CancelledError:
            self._connection.raise_if_closed()
            if done is None and self._cancelled_by_reader():
                return
            raise
        if done is None:
            raise RemoteError("the stream ended without saying how")
        self._take(done, attempts)

    def _take(self, done: pb.Done, attempts: Attempts) -> None:
        """The end of the generate, or of the part of it that a break cut off."""
        result = generate_result(done, self._dropped)
        total = result if self._earlier is None else joined(self._earlier, result)
        left = self.request.max_tokens - result.generated_token_count
        was_cut = result.stop_reason is StopReason.CANCELLED and attempts.after_a_break
        if not was_cut or self.cancelled or left <= 0:
            self.result = total
            self.ended = True
            return
        self._earlier = total
        self._received = 0
        self.request.request_id = new_request_id()
        self.request.max_tokens = left
        self.request.min_tokens = max(0, self.request.min_tokens - result.generated_token_count)
        attempts.after_a_break = False

    def _cancelled_by_reader(self) -> bool:
        """Whether our own `cancel` ended the call, and not the end of the task that reads it."""
        task = asyncio.current_task()
        return self.cancelled and (task is None or task.cancelling() == 0)


def _tokens(event: pb.GenerateEvent) -> Sequence[pb.Token]:
    return [event.token] if event.HasField("token") else event.tokens.tokens


class AsyncStream(Generic[T]):
    """What a generate or a chat says, as it is said. Iterate it once.

    Leaving it early (by `break`, `aclose` or dropping it) cancels the work on the server.
    """

    def __init__(self, items: AsyncGenerator[T, None], generation: Generation) -> None:
        self._items = items
        self._generation = generation
        self._reading = asyncio.Lock()
        generation.reader = weakref.ref(self)

    @property
    def result(self) -> GenerateResult | None:
        """How it ended; None while it runs, after an error, and after leaving early."""
        return self._generation.result

    def cancel(self) -> None:
        """Stop the work on the server. The iteration then gives what was sent already, and ends."""
        self._generation.cancel()

    async def aclose(self) -> None:
        """Leave: cancel the work and give up what was not read."""
        self._generation.cancel()
        # A read under way in another task ends first, now that its call does.
        async with self._reading:
            await self._items.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        async with self._reading:
            return await anext(self._items)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

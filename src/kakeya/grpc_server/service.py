"""The calls of RuntimeService: the caller's key, the runtime's answer, the status."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kakeya.errors import Restarting
from kakeya.grpc_server import messages
from kakeya.grpc_server.status import Context, statuses
from kakeya.serving.commons import Commons
from kakeya.serving.keys import KeyRing
from kakeya.serving.reader import EventReader, EventSource
from kakeya.serving.workers import Workers
from kakeya.types import DoneEvent, Event, FailedEvent, StopReason
from kakeya.wire import runtime_pb2 as pb, runtime_pb2_grpc

if TYPE_CHECKING:  # torch takes a second to import, and the server listens before that
    from kakeya.runtime import Runtime

T = TypeVar("T")


@dataclass(frozen=True)
class Caller:
    """The owner who calls, and the runtime that answers."""

    owner: str
    runtime: "Runtime"


class RuntimeService(runtime_pb2_grpc.RuntimeServiceServicer):
    """Answers UNAVAILABLE until `runtime` is set. Every call checks the key first."""

    def __init__(self, keys: KeyRing, workers: Workers, commons: Commons) -> None:
        self.runtime: Runtime | None = None
        self._keys = keys
        self._workers = workers
        self._commons = commons
        self._streams: set[EventSource] = set()
        self._interrupted = False

    async def CreateSession(
        self, request: pb.CreateSessionRequest, context: Context
    ) -> pb.CreateSessionResponse:
        async with self._caller(context) as caller:
            create = partial(
                caller.runtime.create_session,
                owner=caller.owner,
                client_label=request.client_label,
                eos_token_ids=messages.eos_token_ids(request),
                pinned_prefix_tokens=messages.optional(request, "pinned_prefix_tokens"),
                recall_tokens=request.recall_tokens,
                request_id=request.request_id,
            )
            close = partial(caller.runtime.close_session, owner=caller.owner)
            session_id = await self._new_session(caller, create, close, request.request_id)
            return pb.CreateSessionResponse(session_id=session_id)

    async def AppendTokens(
        self, request: pb.AppendTokensRequest, context: Context
    ) -> pb.AppendTokensResponse:
        async with self._caller(context) as caller:
            length = await self._workers.call(
                caller.runtime.append,
                request.session_id,
                list(request.token_ids),
                messages.optional(request, "expected_history_length"),
                owner=caller.owner,
                request_id=request.request_id,
            )
            return pb.AppendTokensResponse(history_length=length)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        """Writes each event as it comes. However the call ends, the engine's work ends with it."""
        async with self._caller(context) as caller, self._commons.admission.admit(caller.owner):
            begin = partial(
                caller.runtime.generate,
                request.session_id,
                request.max_tokens,
                messages.sampling(request),
                owner=caller.owner,
                request_id=request.request_id,
            )
            stream: EventSource = await self._workers.call_or_undo(begin, lambda late: late.cancel())
            self._streams.add(stream)
            try:
                await self._relay(stream, context, grouped=request.group_tokens)
            except BaseException:
                stream.cancel()
                raise
            finally:
                self._streams.discard(stream)

    async def RecallTokens(
        self, request: pb.RecallTokensRequest, context: Context
    ) -> pb.RecallTokensResponse:
        async with self._caller(context) as caller:
            ranges = await self._workers.call(
                caller.runtime.recall,
                request.session_id,
                messages.ranges_of(request),
                remember=request.remember,
                owner=caller.owner,
                request_id=request.request_id,
            )
            return pb.RecallTokensResponse(ranges=messages.token_ranges(ranges))

    async def GetSessionInfo(
        self, request: pb.GetSessionInfoRequest, context: Context
    ) -> pb.GetSessionInfoResponse:
        async with self._caller(context) as caller:
            info = await self._workers.call(caller.runtime.info, request.session_id, owner=caller.owner)
            return messages.session_info(info)

    async def CloseSession(
        self, request: pb.CloseSessionRequest, context: Context
    ) -> pb.CloseSessionResponse:
        async with self._caller(context) as caller:
            length = await self._workers.call(
                caller.runtime.close_session, request.session_id, owner=caller.owner
            )
            return pb.CloseSessionResponse(final_history_length=length)

    async def ForkSession(self, request: pb.ForkSessionRequest, context: Context) -> pb.ForkSessionResponse:
        async with self._caller(context) as caller:
            fork = partial(
                caller.runtime.fork, request.session_id, owner=caller.owner, request_id=request.request_id
            )

            def close(late: tuple[str, int]) -> None:
                caller.runtime.close_session(late[0], owner=caller.owner)

            session_id, length = await self._new_session(caller, fork, close, request.request_id)
            return pb.ForkSessionResponse(session_id=session_id, history_length=length)

    async def ExportSession(self, request: pb.ExportSessionRequest, context: Context) -> None:
        async with self._caller(context) as caller:
            export = partial(caller.runtime.export_bytes, request.session_id, owner=caller.owner)
            for part in messages.state_parts(await self._workers.call(export)):
                await context.write(part)

    async def ImportSession(
        self, requests: AsyncIterator[pb.ImportSessionRequest], context: Context
    ) -> pb.ImportSessionResponse:
        async with self._caller(context) as caller:
            file, first = await messages.imported_file(requests, caller.runtime.longest_import)
            bring_in = partial(
                caller.runtime.import_bytes,
                file,
                owner=caller.owner,
                client_label=first.client_label,
                request_id=first.request_id,
            )

            def close(late: tuple[str, int]) -> None:
                caller.runtime.close_session(late[0], owner=caller.owner)

            session_id, length = await self._new_session(caller, bring_in, close, first.request_id)
            return pb.ImportSessionResponse(session_id=session_id, history_length=length)

    async def ListSessions(
        self, request: pb.ListSessionsRequest, context: Context
    ) -> pb.ListSessionsResponse:
        async with self._caller(context) as caller:
            sessions, next_page = await self._workers.call(
                caller.runtime.list_sessions,
                owner=caller.owner,
                page_size=request.page_size or messages.DEFAULT_PAGE_SIZE,
                page_token=request.page_token,
            )
            return pb.ListSessionsResponse(
                sessions=map(messages.session_info, sessions), next_page_token=next_page
            )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: Context
    ) -> pb.GetServerInfoResponse:
        async with self._caller(context) as caller:
            return messages.server_info(caller.runtime)

    async def GetTokenizer(
        self, request: pb.GetTokenizerRequest, context: Context
    ) -> pb.GetTokenizerResponse:
        async with self._caller(context) as caller:
            return messages.tokenizer(caller.runtime.tokenizer.files)

    def interrupt(self) -> None:
        """End every generate now; its client is told UNAVAILABLE."""
        self._interrupted = True
        for stream in self._streams:
            stream.cancel()

    @asynccontextmanager
    async def _caller(self, context: Context) -> AsyncIterator[Caller]:
        """The caller, once the key is checked and the model is there. Errors inside become the status."""
        async with statuses(context):
            owner = self._keys.owner_of(context.invocation_metadata() or ())
            if self.runtime is None:
                raise Restarting("the model is still loading")
            yield Caller(owner, self.runtime)

    async def _new_session(
        self, caller: Caller, make: Callable[[], T], close: Callable[[T], object], request_id: str
    ) -> T:
        """What `make` says of the new session. Nobody would ever use a session whose caller has gone, so it
        is closed, unless a request id lets the caller come back and ask for it."""
        take: Callable[[], Awaitable[T]] = partial(self._workers.call, make)
        if not request_id:
            take = partial(self._workers.call_or_undo, make, close)
        return await self._commons.eviction.until_taken(caller.runtime, caller.owner, take)

    async def _relay(self, stream: EventSource, context: Context, *, grouped: bool) -> None:
        """Send events up to the last one. A token is taken only when what came before it was sent."""
        with self._commons.pace.stream():
            reader = EventReader(stream, self._commons.pace)
            ended = False
            while not ended:
                events = await reader.next_events() if grouped else [await reader.next_event()]
                ended = isinstance(events[-1], DoneEvent)
                for message in self._messages(events, grouped=grouped):
                    await context.write(message)

    def _messages(self, events: list[Event], *, grouped: bool) -> Iterator[pb.GenerateEvent]:
        """What tells the client of these events. Raises what ended the generate, after the rest was told."""
        sendable = [event for event in events if not isinstance(event, FailedEvent)]
        interrupted = self._interrupted and _was_cancelled(events[-1])
        if interrupted:
            sendable.pop()
        yield from messages.grouped(sendable) if grouped else map(messages.generate_event, sendable)
        if interrupted:
            raise Restarting("the server is shutting down and stopped this generate")
        if isinstance(events[-1], FailedEvent):
            raise events[-1].error


def _was_cancelled(event: object) -> bool:
    return isinstance(event, DoneEvent) and event.stop_reason is StopReason.CANCELLED

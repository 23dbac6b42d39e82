"""A session on a server: append, generate, chat."""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self, Unpack

from grpc.aio import AioRpcError

from kakeya.client import values
from kakeya.client.connection import Connection
from kakeya.client.failures import translated
from kakeya.client.requests import build, new_request_id
from kakeya.client.settings import GenerateOptions
from kakeya.client.stream import AsyncStream, Generation
from kakeya.client.values import GenerateResult, SessionInfo, Token
from kakeya.errors import SessionNotFound
from kakeya.types import TokenRange
from kakeya.wire import runtime_pb2 as pb

if TYPE_CHECKING:
    from kakeya.client.chat import Chat


_PART_BYTES = 2**20


async def open_session(connection: Connection, opening: pb.CreateSessionRequest) -> str:
    """A new session on the server; its id."""
    opening.request_id = new_request_id()
    reply: pb.CreateSessionResponse = await connection.call("CreateSession", opening)
    return reply.session_id


async def import_file(connection: Connection, file: bytes, label: str) -> str:
    """A new session on the server that continues an exported one; its id."""
    request_id = new_request_id()
    parts = [
        pb.ImportSessionRequest(data=file[start : start + _PART_BYTES])
        for start in range(0, max(1, len(file)), _PART_BYTES)
    ]
    parts[0].client_label, parts[0].request_id = label, request_id
    reply: pb.ImportSessionResponse = await connection.call("ImportSession", parts)
    return reply.session_id


class AsyncSession:
    """A conversation that the server holds. Made by `AsyncClient.create_session` and `AsyncClient.session`.

    As a context manager it closes the session at the end.
    """

    def __init__(
        self,
        connection: Connection,
        open_chat: "Callable[[], Awaitable[Chat]]",
        session_id: str,
        opening: pb.CreateSessionRequest,
        chat: "Chat | None" = None,
    ) -> None:
        self._connection = connection
        self._open_chat = open_chat
        self._session_id = session_id
        self._opening = opening
        self._chat = chat
        self._latest: Generation | None = None

    @property
    def session_id(self) -> str:
        """Names the session on the server; `client.session(session_id)` attaches to it again."""
        return self._session_id

    @property
    def last_result(self) -> GenerateResult | None:
        """How the last generate or chat ended; None while it runs, after an error and after leaving early."""
        return None if self._latest is None else self._latest.result

    async def append(self, token_ids: Iterable[int], expected_history_length: int | None = None) -> int:
        """Add tokens to the history; returns its length. They are computed by the next generate.

        Raises InvalidArgument for an id outside the vocabulary, SessionBusy during a generate, and
        HistoryMismatch unless the history has `expected_history_length` tokens; nothing is changed then.
        """
        request = build(
            pb.AppendTokensRequest,
            session_id=self._session_id,
            token_ids=list(token_ids),
            expected_history_length=expected_history_length,
            request_id=new_request_id(),
        )
        passes = self._is_stopping()
        reply: pb.AppendTokensResponse = await self._connection.call(
            "AppendTokens", request, conflict_passes=passes
        )
        self._settled(passes)
        return reply.history_length

    def generate(self, max_tokens: int, **options: Unpack[GenerateOptions]) -> AsyncStream[Token]:
        """Generate up to `max_tokens` tokens after the history; iterate the stream to get them.

        The request goes out with the first token asked for. Iterating raises InvalidArgument for a bad option
        or an empty history, SessionBusy while another generate runs, and ResourceExhausted when the
        server has no room.
        """
        generation = self._generation(max_tokens, options)
        return AsyncStream(self._tokens(generation), generation)

    def chat(
        self, text: str, *, max_tokens: int = 512, **options: Unpack[GenerateOptions]
    ) -> AsyncStream[str]:
        """Say `text` and stream the answer as text; the conversation is this object's own.

        The first chat on a session begins a conversation, after whatever the history holds. Where the model's
        template rewrites earlier turns, the conversation moves to a new session (`session_id` changes) and
        the old one is closed. Raises InvalidArgument for a model without a chat template.
        """
        generation = self._generation(max_tokens, options)
        return AsyncStream(self._answer(text, generation), generation)

    async def info(self) -> SessionInfo:
        """What the session holds. Asking does not refresh its idle clock."""
        request = pb.GetSessionInfoRequest(session_id=self._session_id)
        return values.session_info(await self._connection.call("GetSessionInfo", request))

    async def recall(
        self, ranges: Iterable[TokenRange | tuple[int, int]], *, remember: bool = False
    ) -> tuple[TokenRange, ...]:
        """Let the next generate see these ranges of the history again, instead of what would be searched for.

        With `remember`, they take the place of those remembered so far: every later generate that does not
        see them brings them back. Returns what the next one is known to bring back. Raises InvalidArgument
        for ranges outside the history, in sight, that overlap or that are longer than the session's
        `recall_tokens`, and for a session without; nothing is changed then.
        """
        pairs = [(each.start, each.end) if isinstance(each, TokenRange) else each for each in ranges]
        request = build(
            pb.RecallTokensRequest,
            session_id=self._session_id,
            ranges=[build(pb.TokenRange, start=start, end=end) for start, end in pairs],
            remember=remember,
            request_id=new_request_id(),
        )
        passes = self._is_stopping()
        reply: pb.RecallTokensResponse = await self._connection.call(
            "RecallTokens", request, conflict_passes=passes
        )
        self._settled(passes)
        return values.token_ranges(reply.ranges)

    async def fork(self) -> "AsyncSession":
        """A new session with the same history and conversation, independent from here on."""
        request = pb.ForkSessionRequest(session_id=self._session_id, request_id=new_request_id())
        passes = self._is_stopping()
        reply: pb.ForkSessionResponse = await self._connection.call(
            "ForkSession", request, conflict_passes=passes
        )
        self._settled(passes)
        chat = None if self._chat is None else self._chat.fork()
        return AsyncSession(self._connection, self._open_chat, reply.session_id, self._opening, chat)

    async def export(self) -> bytes:
        """The session's whole state as a file, for `import_session` of any server with the same model."""
        attempts = self._connection.attempts(self._connection.timeout)
        while True:
            stub = await self._connection.opened()
            call = stub.ExportSession(
                pb.ExportSessionRequest(session_id=self._session_id),
                timeout=attempts.time_left(),
                metadata=self._connection.metadata,
            )
            try:
                return b"".join([part.data async for part in call])
            except AioRpcError as error:
                await attempts.pause_or_raise(translated(error), conflict_passes=self._is_stopping())

    async def close(self) -> int | None:
        """Free the session, cancelling what runs; its final history length.

        None when the reply was lost on the way and the session is gone all the same.
        """
        attempts = self._connection.attempts(self._connection.timeout)
        request = pb.CloseSessionRequest(session_id=self._session_id)
        try:
            reply: pb.CloseSessionResponse = await self._connection.call(
                "CloseSession", request, attempts=attempts
            )
        except SessionNotFound:
            if not attempts.after_a_break:
                raise
            return None
        return reply.final_history_length

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self.close()
        except SessionNotFound:
            pass  # it was closed or it expired in the meantime, which is what was wanted

    def _generation(self, max_tokens: int, options: GenerateOptions) -> Generation:
        if unknown := options.keys() - GenerateOptions.__annotations__.keys():
            raise TypeError(f"generate has no option {min(unknown)!r}")
        settings: dict[str, Any] = {"max_tokens": max_tokens, **options}
        timeout = settings.pop("timeout", None)
        request = build(pb.GenerateRequest, **settings, request_id=new_request_id(), group_tokens=True)
        return Generation(self._connection, request, timeout)

    async def _tokens(self, generation: Generation) -> AsyncGenerator[Token, None]:
        passes = self._is_stopping()
        self._latest = generation
        generation.request.session_id = self._session_id
        async with aclosing(generation.tokens(conflict_passes=passes)) as tokens:
            async for token in tokens:
                yield token

    async def _answer(self, text: str, generation: Generation) -> AsyncGenerator[str, None]:
        async with generation.within_its_time():
            chat = await self._asked(text)
        async with (
            aclosing(self._tokens(generation)) as tokens,
            aclosing(chat.answer(text, tokens)) as pieces,
        ):
            async for piece in pieces:
                yield piece

    async def _asked(self, text: str) -> "Chat":
        """The conversation, once the message is part of the history."""
        if self._chat is None:
            self._chat = await self._open_chat()
        turn = self._chat.next_turn(text)
        if turn.restarts:
            await self._move()
        await self.append(turn.token_ids)
        return self._chat

    async def _move(self) -> None:
        """To a new empty session with the same settings."""
        successor = await open_session(self._connection, self._opening)
        await self.close()
        self._session_id = successor

    def _is_stopping(self) -> bool:
        """Whether the server may be busy with a generate whose reader has left; makes sure that it stops."""
        if self._latest is None or not self._latest.is_abandoned:
            return False
        self._latest.stop()
        return True

    def _settled(self, was_stopping: bool) -> None:
        if was_stopping and self._latest is not None:
            self._latest.ended = True

"""The plain client: every call runs the asynchronous one on an event loop thread and waits for it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Generic, Self, TypeVar, Unpack

from kakeya.client.asynchronous import AsyncClient
from kakeya.client.loop_thread import LoopThread
from kakeya.client.session import AsyncSession
from kakeya.client.settings import GenerateOptions
from kakeya.client.stream import AsyncStream
from kakeya.client.values import GenerateResult, ServerInfo, SessionInfo, Token
from kakeya.dialing import TLS, Keepalive, Retry
from kakeya.types import TokenRange

if TYPE_CHECKING:
    from kakeya.text import Tokenizer

T = TypeVar("T")


class Client:
    """`AsyncClient` without async: the same calls, each waiting for its outcome. Threads may share it."""

    def __init__(
        self,
        target: str = "127.0.0.1:50051",
        *,
        api_key: str | None = None,
        model: str | None = None,
        tls: TLS | None = None,
        timeout: float | None = 60.0,
        retry: Retry | None = None,
        keepalive: Keepalive | None = None,
    ) -> None:
        """Raises ConfigError for TLS files that cannot be read, and a model that cannot be a name."""
        self._client = AsyncClient(
            target,
            api_key=api_key,
            model=model,
            tls=tls,
            timeout=timeout,
            retry=retry,
            keepalive=keepalive,
        )
        self._thread: LoopThread | None = LoopThread.acquire()

    def create_session(
        self,
        *,
        label: str = "",
        system: str | None = None,
        eos_token_ids: Iterable[int] | None = None,
        ignore_eos: bool = False,
        pinned_prefix_tokens: int | None = None,
        recall_tokens: int = 0,
    ) -> "Session":
        """A new empty session; see `AsyncClient.create_session`."""
        loop = self._loop()
        session = loop.run(
            self._client.create_session(
                label=label,
                system=system,
                eos_token_ids=eos_token_ids,
                ignore_eos=ignore_eos,
                pinned_prefix_tokens=pinned_prefix_tokens,
                recall_tokens=recall_tokens,
            )
        )
        return Session(session, loop)

    def session(self, session_id: str) -> "Session":
        """Attach to a session that exists. An unknown id raises SessionNotFound at its first use."""
        return Session(self._client.session(session_id), self._loop())

    def import_session(self, file: bytes, *, label: str = "") -> "Session":
        """A new session that continues an exported one; see `AsyncClient.import_session`."""
        loop = self._loop()
        return Session(loop.run(self._client.import_session(file, label=label)), loop)

    def list_sessions(self) -> list[SessionInfo]:
        """The caller's own sessions, oldest first."""
        return self._loop().run(self._client.list_sessions())

    def server_info(self) -> ServerInfo:
        """What the server runs."""
        return self._loop().run(self._client.server_info())

    @property
    def tokenizer(self) -> "Tokenizer":
        """The model's tokenizer, fetched from the server once."""
        return self._loop().run(self._fetched_tokenizer())

    def close(self) -> None:
        """Close the connection; running calls end. May be called again."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.run(self._client.close())
            finally:
                thread.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _fetched_tokenizer(self) -> "Tokenizer":
        return await self._client.tokenizer

    def _loop(self) -> LoopThread:
        if self._thread is None:
            raise RuntimeError("this client is closed: make a new one")
        return self._thread


class Session:
    """A conversation that the server holds. Made by `Client.create_session` and `Client.session`.

    As a context manager it closes the session at the end.
    """

    def __init__(self, session: AsyncSession, loop: LoopThread) -> None:
        self._session = session
        self._loop = loop

    @property
    def session_id(self) -> str:
        """Names the session on the server; `client.session(session_id)` attaches to it again."""
        return self._session.session_id

    @property
    def last_result(self) -> GenerateResult | None:
        """How the last generate or chat ended; None while it runs, after an error and after leaving early."""
        return self._session.last_result

    def append(self, token_ids: Iterable[int], expected_history_length: int | None = None) -> int:
        """Add tokens to the history; returns its length. See `AsyncSession.append`."""
        return self._loop.run(self._session.append(token_ids, expected_history_length))

    def generate(self, max_tokens: int, **options: Unpack[GenerateOptions]) -> "Stream[Token]":
        """Generate up to `max_tokens` tokens after the history. See `AsyncSession.generate`."""
        return Stream(self._session.generate(max_tokens, **options), self._loop)

    def chat(self, text: str, *, max_tokens: int = 512, **options: Unpack[GenerateOptions]) -> "Stream[str]":
        """Say `text` and stream the answer as text. See `AsyncSession.chat`."""
        return Stream(self._session.chat(text, max_tokens=max_tokens, **options), self._loop)

    def info(self) -> SessionInfo:
        """What the session holds. Asking does not refresh its idle clock."""
        return self._loop.run(self._session.info())

    def recall(
        self, ranges: Iterable[TokenRange | tuple[int, int]], *, remember: bool = False
    ) -> tuple[TokenRange, ...]:
        """Let the next generate see these ranges of the history again. See `AsyncSession.recall`."""
        return self._loop.run(self._session.recall(ranges, remember=remember))

    def fork(self) -> "Session":
        """A new session with the same history and conversation, independent from here on."""
        return Session(self._loop.run(self._session.fork()), self._loop)

    def export(self) -> bytes:
        """The session's whole state as a file. See `AsyncSession.export`."""
        return self._loop.run(self._session.export())

    def close(self) -> int | None:
        """Free the session; its final history length. See `AsyncSession.close`."""
        return self._loop.run(self._session.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.run(self._session.__aexit__(*error))


class Stream(Generic[T]):
    """What a generate or a chat says, as it is said. Iterate it once, from one thread.

    Leaving it early (by `break`, `close` or dropping it) cancels the work on the server.
    """

    def __init__(self, stream: AsyncStream[T], loop: LoopThread) -> None:
        self._stream = stream
        self._loop = loop

    @property
    def result(self) -> GenerateResult | None:
        """How it ended; None while it runs, after an error and after leaving early."""
        return self._stream.result

    def cancel(self) -> None:
        """Stop the work on the server. The iteration then gives what was sent already, and ends.

        May be called from any thread.
        """
        self._loop.run(self._cancel())

    def close(self) -> None:
        """Leave: cancel the work and give up what was not read."""
        self._loop.run(self._stream.aclose())

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        item = self._loop.run(self._next())
        if item is None:
            raise StopIteration
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def _next(self) -> T | None:
        return await anext(self._stream, None)

    async def _cancel(self) -> None:
        self._stream.cancel()

"""The asynchronous client: the implementation that the plain one wraps."""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, Self

from kakeya.client import values
from kakeya.client.connection import Connection
from kakeya.client.requests import build
from kakeya.client.session import AsyncSession, import_file, open_session
from kakeya.client.values import ServerInfo, SessionInfo
from kakeya.dialing import TLS, Keepalive, Retry
from kakeya.wire import runtime_pb2 as pb

if TYPE_CHECKING:
    # Imported where they are used: token ids need neither a tokenizer nor templates.
    from kakeya.client.chat import Chat
    from kakeya.text import Tokenizer

_PAGE = 1000


class AsyncClient:
    """A connection to a Kakeya server, made at the first call. Use it on one event loop.

    `timeout` limits each call but generate, retries included, in seconds; None: no limit. As a context
    manager it closes the connection at the end; sessions stay on the server until they are closed or expire.
    Every call raises Unavailable when no try reaches the server, Unauthenticated for a missing or wrong key,
    and DeadlineExceeded when the time is over.

    `model` is for a cluster that serves several: the one of new sessions, of the tokenizer and of the
    server's description. Left out, it is the cluster's first. A server that is no cluster takes no notice.
    """

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
        retry, keepalive = retry or Retry(), keepalive or Keepalive()
        self._connection = Connection(target, api_key, model, tls, timeout, retry, keepalive)
        self._tokenizer: Tokenizer | None = None
        self._fetching = asyncio.Lock()  # many sessions may begin to chat at once

    async def create_session(
        self,
        *,
        label: str = "",
        system: str | None = None,
        eos_token_ids: Iterable[int] | None = None,
        ignore_eos: bool = False,
        pinned_prefix_tokens: int | None = None,
        recall_tokens: int = 0,
    ) -> AsyncSession:
        """A new empty session. Raises ResourceExhausted when the server has no room for one.

        `system` is for `session.chat`: the message is kept for ever, up to half of what the session holds,
        and answers end where the model's template ends them, unless the other arguments say otherwise.
        `pinned_prefix_tokens` keeps that many first tokens for ever. With `recall_tokens`, each turn sees up
        to so many tokens again that have left the window: those that share words with what was appended. With
        `ignore_eos` nothing but the length ends a generate.
        """
        eos = None if eos_token_ids is None else list(eos_token_ids)
        chat = None if system is None else await self._new_chat(system, eos)
        if chat is not None and not ignore_eos and eos is None:
            eos = chat.end_token_ids
        if chat is not None and pinned_prefix_tokens is None:
            pinned_prefix_tokens = chat.pinned_prefix_tokens(await self.server_info())
        opening = build(
            pb.CreateSessionRequest,
            client_label=label,
            eos_token_ids=eos,
            ignore_eos=ignore_eos,
            pinned_prefix_tokens=pinned_prefix_tokens,
            recall_tokens=recall_tokens,
        )
        session_id = await open_session(self._connection, opening)
        return AsyncSession(self._connection, self._new_chat, session_id, opening, chat)

    def session(self, session_id: str) -> AsyncSession:
        """Attach to a session that exists. An unknown id raises SessionNotFound at its first use."""
        return AsyncSession(self._connection, self._new_chat, session_id, pb.CreateSessionRequest())

    async def import_session(self, file: bytes, *, label: str = "") -> AsyncSession:
        """A new session that continues an exported one, of a server with the same model.

        Raises StateMismatch for a file of another model or geometry, and for a damaged one.
        """
        session_id = await import_file(self._connection, file, label)
        return self.session(session_id)

    async def list_sessions(self) -> list[SessionInfo]:
        """The caller's own sessions, oldest first."""
        sessions: list[SessionInfo] = []
        page_token = ""
        while True:
            request = pb.ListSessionsRequest(page_size=_PAGE, page_token=page_token)
            page: pb.ListSessionsResponse = await self._connection.call("ListSessions", request)
            sessions += map(values.session_info, page.sessions)
            page_token = page.next_page_token
            if not page_token:
                return sessions

    async def server_info(self) -> ServerInfo:
        """What the server runs."""
        return values.server_info(await self._connection.call("GetServerInfo", pb.GetServerInfoRequest()))

    @property
    def tokenizer(self) -> "Awaitable[Tokenizer]":
        """The model's tokenizer, fetched from the server once: `tokenizer = await client.tokenizer`."""
        return self._fetched_tokenizer()

    async def close(self) -> None:
        """Close the connection; running calls end. May be called again."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _new_chat(self, system: str | None = None, eos_token_ids: list[int] | None = None) -> "Chat":
        from kakeya.client.chat import Chat

        eos = (await self.server_info()).eos_token_ids if eos_token_ids is None else eos_token_ids
        return Chat(await self.tokenizer, eos, system)

    async def _fetched_tokenizer(self) -> "Tokenizer":
        from kakeya.client.chat import fetch_tokenizer

        async with self._fetching:
            if self._tokenizer is None:
                self._tokenizer = await fetch_tokenizer(self._connection)
            return self._tokenizer

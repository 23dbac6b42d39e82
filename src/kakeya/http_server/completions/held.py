"""Conversations that are kept after their answer, because the next request may continue one of them.

They are a cache: no client ever named one. Each is kept for a while, for its owner alone, and evicted when
there are too many or when a slab is needed. Where there is a state directory they outlive the process.
"""

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kakeya.errors import KakeyaError
from kakeya.http_server.archive import Archive, message_fields, read_message
from kakeya.http_server.text_sessions import TextSession, TextSessions
from kakeya.text.prompting import Message
from kakeya.types import Document

log = logging.getLogger(__name__)
_CHAT = "chat"


@dataclass(frozen=True)
class _Held:
    """A session that waits, the digest of its messages, and when it has waited long enough."""

    session: TextSession
    digest: bytes
    expires_at: float


class HeldConversations:
    """At most `most` sessions, each for `seconds`. Used from one event loop.

    A session is held or in use, never both: `claim` hands it over, `hold` takes it back.
    """

    def __init__(
        self, sessions: TextSessions, most: int, seconds: float, archive: Archive | None = None
    ) -> None:
        self.sessions = sessions
        self._archive = archive or Archive()
        self._most = most
        self._seconds = seconds
        self._held: list[_Held] = []  # oldest first
        self._stored: set[str] = set()  # sessions that were stored when they were held last
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    def claim(
        self, owner: str, messages: Sequence[Message], tools: str, variables: str = ""
    ) -> TextSession | None:
        """The longest, and of those the newest, of the owner's sessions that `messages` continue. It is the
        caller's alone. What comes after `len(session.messages)` is new: at least one message."""
        if not self._held:
            return None
        lengths = {
            digest: length for length, digest in enumerate(_digests(messages[:-1], tools + variables), 1)
        }
        fitting = [held for held in self._held if held.session.owner == owner and held.digest in lengths]
        longest = max(reversed(fitting), key=lambda held: lengths[held.digest], default=None)
        if longest is None:
            return None
        self._held.remove(longest)
        return longest.session

    async def hold(self, session: TextSession) -> None:
        """Keep a session that ends with an answer. Beyond the bound, the owner with most loses the oldest."""
        self._add(session, self._seconds)
        if self._most > 0:
            await self._store(session)
        while len(self._held) > self._most:
            await self._drop(self._surplus())

    async def recover(self, found: Mapping[str, tuple[str, int]]) -> set[str]:
        """Hold again what is stored and was not held for too long, if its session is among those `found`, as
        it was left. The sessions that are held."""
        call = self.sessions.state.workers.call
        for document in await call(self._archive.documents, _CHAT):
            # A cache may forget: no clock needs to be trusted.
            left = self._seconds - max(0.0, time.time() - document.used_at)
            if left > 0 and found.get(document.name) == (document.owner, document.state["length"]):
                self._add(await call(_read, document, self.sessions), left)
                self._stored.add(document.name)
            else:
                self._archive.note(_CHAT, document.name, _nothing)
        while len(self._held) > self._most:
            await self._drop(self._surplus())
        return {held.session.session_id for held in self._held}

    async def close(self, session: TextSession) -> None:
        """Close a session that is in use, and forget what was stored when it was held."""
        self._forget(session)
        await self.sessions.close(session)

    async def evict(self, owner: str, own_only: bool) -> bool:
        """Close the owner's oldest, or else, unless `own_only`, the oldest of all. False if there is none."""
        own = [held for held in self._held if held.session.owner == owner]
        candidates = own or ([] if own_only else self._held)
        if not candidates:
            return False
        await self._drop(candidates[0])
        return True

    async def _drop(self, held: _Held) -> None:
        self._held.remove(held)
        await self.close(held.session)

    def _forget(self, session: TextSession) -> None:
        if session.session_id in self._stored:
            self._stored.remove(session.session_id)
            self._archive.note(_CHAT, session.session_id, _nothing)

    async def _store(self, session: TextSession) -> None:
        """What is only a cache can do without being stored."""
        document = _document(session, time.time())  # as it is now: it may go on
        self._stored.add(session.session_id)
        self._archive.note(_CHAT, session.session_id, lambda _: document, whole=True)
        try:
            await self._archive.flush()
        except KakeyaError as error:
            log.warning("a conversation is held and not stored: %s", error)

    def _add(self, session: TextSession, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        *_, digest = _digests(session.messages, session.tools + session.variables)
        self._held.append(_Held(session, digest, loop.time() + seconds))
        self._watch(loop)

    def _surplus(self) -> _Held:
        """The oldest of the owner with most."""
        counts = Counter(held.session.owner for held in self._held)
        # Of equals, max takes the first, which is the oldest.
        return max(self._held, key=lambda held: counts[held.session.owner])

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the timer for the oldest."""
        if self._timer is None and self._held:
            self._timer = loop.call_at(self._held[0].expires_at, self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        expired = [held for held in self._held if held.expires_at <= loop.time()]
        self._held = self._held[len(expired) :]
        for held in expired:
            self._forget(held.session)
            self.sessions.close_soon(held.session)
        self._watch(loop)


def _document(session: TextSession, used_at: float) -> Document:
    """A held conversation as it is stored, under the name of its session."""
    messages = [message_fields(message) for message in session.messages]
    contents = {
        "messages": messages,
        "tools": session.tools,
        "variables": session.variables,
        "closed": session.closed,
    }
    state = {"length": session.history_length}
    return Document(_CHAT, session.session_id, session.owner, contents, state, used_at)


def _read(document: Document, sessions: TextSessions) -> TextSession:
    """The conversation, from what is stored. Call it on a worker."""
    contents = document.contents
    return TextSession(
        document.owner,
        sessions.prompter.end_token_ids,
        tuple(map(read_message, contents["messages"])),
        contents["closed"],
        contents["tools"],
        document.name,
        document.state["length"],
        contents["variables"],
    )


def _nothing(whole: bool) -> None:
    """Of a conversation that is not held any more."""


def _digests(messages: Sequence[Message], settings: str) -> Iterator[bytes]:
    """The digests of the first message, of the first two, and so on. `settings` are the tools, a JSON list,
    and the template's variables, a JSON object."""
    digest = hashlib.sha256(settings.encode())
    for message in messages:
        # Each is as long as it says, so that no two lists of messages are the same bytes.
        identity = message.identity().encode()
        digest.update(b"%d:" % len(identity) + identity)
        yield digest.digest()

"""Conversations that are kept after their answer, because the next request may continue one of them.

They are a cache: no client ever named one. Each is kept for a while, for its owner alone, and evicted when
there are too many or when a slab is needed.
"""

import asyncio
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kakeya.http_server.text_sessions import TextSession, TextSessions
from kakeya.text.prompting import Message


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

    def __init__(self, sessions: TextSessions, most: int, seconds: float) -> None:
        self.sessions = sessions
        self._most = most
        self._seconds = seconds
        self._held: list[_Held] = []  # oldest first
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._held)

    def claim(self, owner: str, messages: Sequence[Message], tools: str) -> TextSession | None:
        """The longest, and of those the newest, of the owner's sessions that `messages` continue. It is the
        caller's alone. What comes after `len(session.messages)` is new: at least one message."""
        if not self._held:
            return None
        lengths = {digest: length for length, digest in enumerate(_digests(messages[:-1], tools), 1)}
        fitting = [held for held in self._held if held.session.owner == owner and held.digest in lengths]
        longest = max(reversed(fitting), key=lambda held: lengths[held.digest], default=None)
        if longest is None:
            return None
        self._held.remove(longest)
        return longest.session

    async def hold(self, session: TextSession) -> None:
        """Keep a session that ends with an answer. Beyond the bound, the owner with most loses the oldest."""
        loop = asyncio.get_running_loop()
        *_, digest = _digests(session.messages, session.tools)
        self._held.append(_Held(session, digest, loop.time() + self._seconds))
        self._watch(loop)
        if len(self._held) > self._most:
            counts = Counter(held.session.owner for held in self._held)
            # Of equals, max takes the first, which is the oldest.
            await self._drop(max(self._held, key=lambda held: counts[held.session.owner]))

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
        await self.sessions.close(held.session)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Set the timer for the oldest."""
        if self._timer is None and self._held:
            self._timer = loop.call_at(self._held[0].expires_at, self._expire, loop)

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = None
        expired = [held for held in self._held if held.expires_at <= loop.time()]
        self._held = self._held[len(expired) :]
        for held in expired:
            self.sessions.close_soon(held.session)
        self._watch(loop)


def _digests(messages: Sequence[Message], tools: str) -> Iterator[bytes]:
    """The digests of the first message, of the first two, and so on."""
    digest = hashlib.sha256(tools.encode())
    for message in messages:
        # Each is as long as it says, so that no two lists of messages are the same bytes.
        identity = message.identity().encode()
        digest.update(b"%d:" % len(identity) + identity)
        yield digest.digest()

"""What was answered, and what it takes to go on from there: responses, their branches, conversations."""

import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from kakeya.http_server.archive import Archive
from kakeya.http_server.responses.documents import (
    CONVERSATION,
    RESPONSE,
    conversation_document,
    record_document,
)
from kakeya.http_server.responses.records import Conversation, Record
from kakeya.types import Document

Kept = TypeVar("Kept", Record, Conversation)


@dataclass
class _Owned:
    """What is kept for one owner, least recently used first."""

    records: OrderedDict[str, Record] = field(default_factory=OrderedDict)
    conversations: OrderedDict[str, Conversation] = field(default_factory=OrderedDict)


class ResponseStore:
    """Everything that is remembered, by owner. Used from one event loop. Closes no session itself: a record
    that nothing leads to any more is handed to `forgotten`.

    At most `limit` responses, of about `most_bytes` together, and as many conversations are kept for each
    owner; heads that have a session do not give way. What nobody used for `ttl` seconds is forgotten (None:
    never). All that changes is noted in the `archive`, whose `flush` says that it is stored.
    """

    def __init__(
        self,
        limit: int,
        ttl: float | None,
        forgotten: Callable[[Record], None],
        clock: Callable[[], float] = time.monotonic,
        most_bytes: int = 64 * 2**20,
        archive: Archive | None = None,
    ) -> None:
        self.archive = archive or Archive()
        self._limit = limit
        self._most_bytes = most_bytes
        self._ttl = float("inf") if ttl is None else ttl
        self._forgotten = forgotten
        self._clock = clock
        self._swept_at = clock()
        self._owned: defaultdict[str, _Owned] = defaultdict(_Owned)

    def record(self, owner: str, response_id: str) -> Record | None:
        """The owner's response; None when it is unknown, forgotten or somebody else's."""
        return self._fresh(self._owned[owner].records.get(response_id))

    def conversation(self, owner: str, conversation_id: str) -> Conversation | None:
        """The owner's conversation; None when it is unknown, forgotten or somebody else's."""
        return self._fresh(self._owned[owner].conversations.get(conversation_id))

    def conversations(self, owner: str) -> list[Conversation]:
        """The owner's, newest first."""
        kept = tuple(self._owned[owner].conversations.values())
        return [conversation for conversation in reversed(kept) if self._fresh(conversation)]

    def live(self, owner: str | None = None) -> list[Record]:
        """An owner's, or everybody's, that have a session, least recently used first."""
        everything = self._owned.values() if owner is None else (self._owned[owner],)
        records = (record for owned in everything for record in owned.records.values() if record.session)
        return sorted(records, key=lambda record: record.last_used)

    def add(self, record: Record) -> None:
        """Remember a response; its parent is continued by it. The oldest give way to it."""
        if record.parent is not None:
            record.parent.children += 1
            record.parent.newest_child = record.id
        records = self._owned[record.owner].records
        records[record.id] = record
        record.is_listed = True
        self._store(record)
        self.use(record)
        for old in self._surplus_records(records):
            self._forget(old)

    def add_conversation(self, conversation: Conversation) -> None:
        """Remember a conversation. The oldest give way to it, except those that have a session."""
        conversations = self._owned[conversation.owner].conversations
        conversations[conversation.id] = conversation
        conversation.is_stored = True
        self.changed(conversation, whole=True)
        self.use(conversation)
        older = [old for old in tuple(conversations.values())[:-1] if not (old.is_busy or old.session)]
        for old in older[: max(0, len(conversations) - self._limit)]:
            self._forget_conversation(old)

    def use(self, used: Record | Conversation) -> None:
        """It was made or continued just now."""
        owned = self._owned[used.owner]
        kept: OrderedDict[str, Any] = owned.records if isinstance(used, Record) else owned.conversations
        used.last_used = used.tree.last_used = self._clock()
        self.changed(used)
        if used.id in kept:
            kept.move_to_end(used.id)

    def restore(self, kept: Record | Conversation, idle: float) -> None:
        """Have again what another process has stored. What was used last comes last."""
        kept.is_stored = True
        kept.last_used = self._clock() - idle
        kept.tree.last_used = max(kept.tree.last_used or kept.last_used, kept.last_used)
        owned = self._owned[kept.owner]
        if isinstance(kept, Conversation):
            owned.conversations[kept.id] = kept
        elif kept.is_listed:
            owned.records[kept.id] = kept

    def changed(self, kept: Record | Conversation, *, whole: bool = False) -> None:
        """Something of it is to be stored."""
        if kept.is_stored:
            self._note(kept, whole=whole)

    def move(self, conversation: Conversation, record: Record | None) -> None:
        """The conversation stands at `record` from now on."""
        left = conversation.head
        conversation.move_to(record)
        self.changed(conversation)
        if left is not None:
            self._let_go(left)

    def remove(self, record: Record) -> None:
        """Forget a response for its owner. Those that continued it go on, and so does a conversation that
        stands there."""
        if record.parent is not None and record.children == 0:
            record.parent.children -= 1
        self._forget(record)

    def remove_conversation(self, conversation: Conversation) -> None:
        """Forget a conversation and the responses made in it, unless another conversation stands there."""
        self._forget_conversation(conversation)
        for record in tuple(self._owned[conversation.owner].records.values()):
            if record.conversation_id == conversation.id and record.claims == 0:
                self._forget(record)

    def _surplus_records(self, records: OrderedDict[str, Record]) -> Iterator[Record]:
        """The oldest that are too many or take too much; not the newest, nor a head with its session."""
        number, size = len(records), sum(record.size for record in records.values())
        for record in tuple(records.values())[:-1]:
            if number <= self._limit and size <= self._most_bytes:
                return
            # By now the session of a head may have expired.
            expired = self._clock() - record.last_used >= self._ttl
            if expired or not record.is_head or record.session is None:
                number, size = number - 1, size - record.size
                yield record

    def _fresh(self, found: Kept | None) -> Kept | None:
        """The same, unless it has expired. Sweeps, so seldom that it costs nothing."""
        now = self._clock()
        if now - self._swept_at >= self._ttl / 16:
            self._swept_at = now
            self.sweep()
        return None if found is None or self._is_expired(found) else found

    def _is_expired(self, each: Record | Conversation) -> bool:
        return not each.is_busy and self._clock() - each.tree.last_used >= self._ttl

    def sweep(self) -> None:
        """Forget the trees that nobody used for too long."""
        for owned in self._owned.values():
            for conversation in tuple(owned.conversations.values()):
                if self._is_expired(conversation):
                    self._forget_conversation(conversation)
            for record in tuple(owned.records.values()):
                if self._is_expired(record):
                    self._forget(record)

    def _forget(self, record: Record) -> None:
        self._owned[record.owner].records.pop(record.id, None)
        record.is_listed = False
        record.forget_details()
        self.changed(record, whole=True)
        self._let_go(record)

    def _forget_conversation(self, conversation: Conversation) -> None:
        self._owned[conversation.owner].conversations.pop(conversation.id, None)
        conversation.is_stored = False
        self._note(conversation)
        self.move(conversation, None)

    def _let_go(self, record: Record) -> None:
        if record.claims == 0 and not record.is_listed:
            self._forgotten(record)
            self._erase(record)

    def _store(self, record: Record) -> None:
        """Store it and all that it goes on from: what is said in it stands on what was said before."""
        stored: Record | None = record
        while stored is not None and not stored.is_stored:
            stored.is_stored = True
            self.changed(stored, whole=True)
            stored = stored.parent
            if stored is not None:
                stored.followers += 1
                self.changed(stored)

    def _erase(self, record: Record) -> None:
        """Delete it if nothing leads to it any more, and what it was that alone led to."""
        unneeded: Record | None = record
        while unneeded is not None and unneeded.is_stored and not unneeded.is_needed:
            unneeded.is_stored = False
            self._note(unneeded)
            unneeded = unneeded.parent
            if unneeded is not None:
                unneeded.followers -= 1

    def _note(self, kept: Record | Conversation, *, whole: bool = False) -> None:
        """It is to be stored, or deleted if it is not needed by then."""
        kind = RESPONSE if isinstance(kept, Record) else CONVERSATION
        self.archive.note(kind, kept.id, partial(self._document, kept), whole=whole)

    def _document(self, kept: Record | Conversation, whole: bool) -> Document | None:
        if not kept.is_stored:
            return None
        used_at = time.time() - (self._clock() - kept.last_used)
        if isinstance(kept, Record):
            return record_document(kept, used_at, whole=whole)
        return conversation_document(kept, used_at, whole=whole)

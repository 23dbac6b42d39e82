"""What was answered, and what it takes to go on from there: responses, their branches, conversations.

A record points at the one it continued, so a chain of any length costs each record only what was new in it.
"""

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeVar

from kakeya.errors import SessionBusy
from kakeya.http_server.responses.items import Item, new_id
from kakeya.http_server.text_sessions import TextSession
from kakeya.text.prompting import Message

_TITLE_LENGTH = 60
# What a log-probability takes in memory, about.
_LOGPROB_BYTES = 500


@dataclass(eq=False)
class Tree:
    """All that grew from one beginning. If nobody uses any of it for long, it is forgotten as a whole."""

    last_used: float = 0.0


@dataclass(eq=False)
class Record:
    """One response: what was said, and the session in which it can be continued.

    `session` is None when its session was given up; it can be rebuilt from the messages. `claims` counts the
    conversations that stand here. `lock` is held while `session` changes across a wait; if the record is
    forgotten in the meantime, `is_gone` says so. `item_count` is of all items up to here.
    """

    id: str
    owner: str
    tree: Tree
    parent: "Record | None"
    conversation_id: str | None
    instructions: str | None
    tools: tuple[dict[str, Any], ...]
    messages: tuple[Message, ...]
    input_items: list[Item]
    body: dict[str, Any]
    session: TextSession | None
    children: int = 0
    newest_child: str = ""
    claims: int = 0
    last_used: float = 0.0
    is_gone: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        before = 0 if self.parent is None else self.parent.item_count
        self.item_count: int = before + len(self.input_items) + len(self.body["output"])

    @property
    def is_busy(self) -> bool:
        """Whether somebody is continuing it at this moment."""
        return self.lock.locked()

    @property
    def is_head(self) -> bool:
        """The newest of its branch, or where a conversation stands."""
        return self.children == 0 or self.claims > 0

    @property
    def is_left_behind(self) -> bool:
        """It was continued, or a newer attempt took its place: its session only makes coming back quick."""
        is_replaced = self.parent is not None and self.parent.newest_child != self.id
        return self.session is not None and self.claims == 0 and (self.children > 0 or is_replaced)

    @property
    def is_lone(self) -> bool:
        """A first response that nobody has continued, and perhaps nobody will: few clients say so."""
        return self.session is not None and self.claims == 0 and self.children == 0 and self.parent is None

    @cached_property
    def size(self) -> int:
        """About how many bytes it takes."""
        calls = (call.arguments for message in self.messages for call in message.tool_calls)
        said = sum(map(len, (*(message.content for message in self.messages), *calls)))
        logprobs = (token for part in self._parts() for token in part["logprobs"])
        return said + _LOGPROB_BYTES * sum(1 + len(token["top_logprobs"]) for token in logprobs)

    def forget_details(self) -> None:
        """Nobody can ask for it any more; only what was said is still needed."""
        for part in self._parts():
            part["logprobs"] = []

    def _parts(self) -> Iterator[dict[str, Any]]:
        return (part for item in self.body["output"] for part in item.get("content", ()))

    def chain(self) -> list["Record"]:
        """From the first response to this one."""
        records: list[Record] = []
        record: Record | None = self
        while record is not None:
            records.append(record)
            record = record.parent
        return records[::-1]

    def conversation_messages(self) -> list[Message]:
        """All that was said up to here, without the instructions."""
        return [message for record in self.chain() for message in record.messages]

    def items(self) -> list[Item]:
        """All items up to here, oldest first."""
        return [item for record in self.chain() for item in (*record.input_items, *record.body["output"])]


@dataclass(eq=False)
class Conversation:
    """A named place that moves on with every response. `items` and `messages` are what it began with."""

    owner: str
    metadata: dict[str, str]
    items: list[Item]
    messages: tuple[Message, ...]
    tree: Tree = field(default_factory=Tree)
    id: str = field(default_factory=partial(new_id, "conv"))
    created_at: int = field(default_factory=lambda: int(time.time()))
    head: Record | None = None
    is_busy: bool = False
    last_used: float = 0.0
    _title: str = ""

    @property
    def session(self) -> TextSession | None:
        """The session in which it can be continued, if there is one."""
        return None if self.head is None else self.head.session

    def check_rests(self) -> None:
        """Raises SessionBusy while it is being answered."""
        if self.is_busy:
            raise SessionBusy(f"conversation {self.id!r} is being answered; wait until it has been")

    @contextmanager
    def claim(self) -> Iterator[None]:
        """Keeps others from answering it. Raises SessionBusy while somebody does."""
        self.check_rests()
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False

    def move_to(self, record: Record | None) -> None:
        """Stand at `record` from now on."""
        if self.head is not None:
            self.head.claims -= 1
        if record is not None:
            record.claims += 1
        self.head = record

    def all_items(self) -> list[Item]:
        return [*self.items, *(self.head.items() if self.head is not None else ())]

    @property
    def item_count(self) -> int:
        return len(self.items) + (self.head.item_count if self.head is not None else 0)

    @property
    def title(self) -> str:
        """The first words of the user's."""
        if not self._title:
            said = (item for item in self.all_items() if item.get("role") == "user" and item["content"])
            line = " ".join(next(said, {"content": [{"text": ""}]})["content"][0]["text"].split())
            self._title = line if len(line) <= _TITLE_LENGTH else line[: _TITLE_LENGTH - 1] + "…"
        return self._title


Kept = TypeVar("Kept", Record, Conversation)


@dataclass
class _Shelf:
    """What is kept for one owner, least recently used first."""

    records: OrderedDict[str, Record] = field(default_factory=OrderedDict)
    conversations: OrderedDict[str, Conversation] = field(default_factory=OrderedDict)


class ResponseStore:
    """Everything that is remembered, by owner. Used from one event loop. Closes no session itself: a record
    that nothing leads to any more is handed to `forgotten`.

    At most `limit` responses, of about `most_bytes` together, and as many conversations are kept for each
    owner; heads that have a session do not give way. What nobody used for `ttl` seconds is forgotten (None:
    never).
    """

    def __init__(
        self,
        limit: int,
        ttl: float | None,
        forgotten: Callable[[Record], None],
        clock: Callable[[], float] = time.monotonic,
        most_bytes: int = 64 * 2**20,
    ) -> None:
        self._limit = limit
        self._most_bytes = most_bytes
        self._ttl = float("inf") if ttl is None else ttl
        self._forgotten = forgotten
        self._clock = clock
        self._swept_at = clock()
        self._shelves: defaultdict[str, _Shelf] = defaultdict(_Shelf)

    def record(self, owner: str, response_id: str) -> Record | None:
        """The owner's response; None when it is unknown, forgotten or somebody else's."""
        return self._fresh(self._shelves[owner].records.get(response_id))

    def conversation(self, owner: str, conversation_id: str) -> Conversation | None:
        """The owner's conversation; None when it is unknown, forgotten or somebody else's."""
        return self._fresh(self._shelves[owner].conversations.get(conversation_id))

    def conversations(self, owner: str) -> list[Conversation]:
        """The owner's, newest first."""
        kept = tuple(self._shelves[owner].conversations.values())
        return [conversation for conversation in reversed(kept) if self._fresh(conversation)]

    def live(self, owner: str | None = None) -> list[Record]:
        """An owner's, or everybody's, that have a session, least recently used first."""
        shelves = self._shelves.values() if owner is None else (self._shelves[owner],)
        records = (record for shelf in shelves for record in shelf.records.values() if record.session)
        return sorted(records, key=lambda record: record.last_used)

    def add(self, record: Record) -> None:
        """Remember a response; its parent is continued by it. The oldest give way to it."""
        if record.parent is not None:
            record.parent.children += 1
            record.parent.newest_child = record.id
        records = self._shelves[record.owner].records
        records[record.id] = record
        self.use(record)
        for old in self._surplus_records(records):
            self._forget(old)

    def add_conversation(self, conversation: Conversation) -> None:
        """Remember a conversation. The oldest give way to it, except those that have a session."""
        conversations = self._shelves[conversation.owner].conversations
        conversations[conversation.id] = conversation
        self.use(conversation)
        older = [old for old in tuple(conversations.values())[:-1] if not (old.is_busy or old.session)]
        for old in older[: max(0, len(conversations) - self._limit)]:
            self._forget_conversation(old)

    def use(self, used: Record | Conversation) -> None:
        """It was made or continued just now."""
        shelf = self._shelves[used.owner]
        kept: OrderedDict[str, Any] = shelf.records if isinstance(used, Record) else shelf.conversations
        used.last_used = used.tree.last_used = self._clock()
        if used.id in kept:
            kept.move_to_end(used.id)

    def move(self, conversation: Conversation, record: Record | None) -> None:
        """The conversation stands at `record` from now on."""
        left = conversation.head
        conversation.move_to(record)
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
        for record in tuple(self._shelves[conversation.owner].records.values()):
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
            self._sweep()
        return None if found is None or self._is_expired(found) else found

    def _is_expired(self, each: Record | Conversation) -> bool:
        return not each.is_busy and self._clock() - each.tree.last_used >= self._ttl

    def _sweep(self) -> None:
        """Forget the trees that nobody used for too long."""
        for shelf in self._shelves.values():
            for conversation in tuple(shelf.conversations.values()):
                if self._is_expired(conversation):
                    self._forget_conversation(conversation)
            for record in tuple(shelf.records.values()):
                if self._is_expired(record):
                    self._forget(record)

    def _forget(self, record: Record) -> None:
        self._shelves[record.owner].records.pop(record.id, None)
        record.forget_details()
        self._let_go(record)

    def _forget_conversation(self, conversation: Conversation) -> None:
        self._shelves[conversation.owner].conversations.pop(conversation.id, None)
        self.move(conversation, None)

    def _let_go(self, record: Record) -> None:
        if record.claims == 0 and record.id not in self._shelves[record.owner].records:
            self._forgotten(record)

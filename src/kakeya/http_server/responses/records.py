"""The nouns of stored responses: a response, what grew from one beginning, a conversation.

A record points at the one it continued, so a chain of any length costs each record only what was new in it.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

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
    id: str = field(default_factory=partial(new_id, "tree"))


@dataclass(eq=False)
class Record:
    """One response: what was said, and the session in which it can be continued.

    `session` is None when its session was given up; it can be rebuilt from the messages. `claims` counts the
    conversations that stand here, `followers` the stored records that go on from here. `lock` is held while
    `session` changes across a wait; if the record is forgotten in the meantime, `is_gone` says so.
    `is_listed`: its owner can ask for it. `item_count` is of all items up to here. `variables` is what the
    template was told besides.
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
    variables: str = ""
    children: int = 0
    newest_child: str = ""
    claims: int = 0
    followers: int = 0
    last_used: float = 0.0
    is_gone: bool = False
    is_listed: bool = False
    is_stored: bool = False
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

    @property
    def is_needed(self) -> bool:
        """Whether something leads to it."""
        return self.is_listed or self.claims > 0 or self.followers > 0

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
    is_stored: bool = False
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

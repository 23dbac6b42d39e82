"""Responses and conversations as documents of the state directory, and back."""

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kakeya.http_server.archive import message_fields, read_message
from kakeya.http_server.responses.records import Conversation, Record, Tree
from kakeya.http_server.text_sessions import TextSession
from kakeya.http_server.tools import function_tool
from kakeya.text.prompting import Message, written_tools
from kakeya.types import Document

log = logging.getLogger(__name__)
RESPONSE, CONVERSATION = "response", "conversation"
# Of a session by its id: who owns it, and how long its history is.
Found = Mapping[str, tuple[str, int]]


def record_document(record: Record, used_at: float, *, whole: bool) -> Document:
    """A response, with its contents if it is wanted `whole`."""
    session = record.session
    state = {
        "is_listed": record.is_listed,
        "children": record.children,
        "newest_child": record.newest_child,
        "session": None if session is None else [session.session_id, session.history_length, session.closed],
    }
    contents = {
        "tree": record.tree.id,
        "parent": None if record.parent is None else record.parent.id,
        "conversation": record.conversation_id,
        "instructions": record.instructions,
        "tools": record.tools,
        "variables": record.variables,
        "messages": [message_fields(message) for message in record.messages],
        "input_items": record.input_items,
        "body": record.body,
    }
    return Document(RESPONSE, record.id, record.owner, contents if whole else None, state, used_at)


def conversation_document(conversation: Conversation, used_at: float, *, whole: bool) -> Document:
    """A conversation, with what it began with if it is wanted `whole`."""
    head = conversation.head
    state = {"head": None if head is None else head.id, "metadata": conversation.metadata}
    contents = {
        "tree": conversation.tree.id,
        "items": conversation.items,
        "messages": [message_fields(message) for message in conversation.messages],
        "created_at": conversation.created_at,
    }
    name, owner = conversation.id, conversation.owner
    return Document(CONVERSATION, name, owner, contents if whole else None, state, used_at)


class Reader:
    """Makes records and conversations of documents again, with those of their sessions that are there.

    `sessions` are those of the runtime. One that has another length than is stored was in use when the
    process died: what is missing can be rebuilt from the messages.
    """

    def __init__(self, sessions: Found, end_token_ids: Callable[[], frozenset[int]]) -> None:
        self._sessions = sessions
        self._end_token_ids = end_token_ids
        self._trees: defaultdict[str, Tree] = defaultdict(Tree)
        self._records: dict[str, Record] = {}

    def records(self, documents: Sequence[Document]) -> list[Record]:
        """All of them, in the order of the documents. One whose beginning is lost is left out."""
        by_name = {document.name: document for document in documents}
        for document in documents:
            self._read_chain(document, by_name)
        return [self._records[name] for name in by_name if name in self._records]

    def conversation(self, document: Document) -> Conversation | None:
        """The conversation, standing where it stood; None when that is lost. Call it after `records`."""
        contents, state = document.contents, document.state
        head = None if state["head"] is None else self._records.get(state["head"])
        if head is None and state["head"] is not None:
            log.error("conversation %s is lost: response %s is not stored", document.name, state["head"])
            return None
        conversation = Conversation(
            document.owner,
            state["metadata"],
            contents["items"],
            _messages(contents),
            self._tree(contents),
            document.name,
            contents["created_at"],
        )
        conversation.move_to(head)
        return conversation

    def _read_chain(self, document: Document, by_name: Mapping[str, Document]) -> None:
        """The record of a document, after those it goes on from. A chain can be long."""
        chain = [document]
        while (parent := chain[-1].contents["parent"]) is not None and parent not in self._records:
            if parent not in by_name:
                log.error("response %s is lost: response %s is not stored", document.name, parent)
                return
            chain.append(by_name[parent])
        for each in reversed(chain):
            if each.name not in self._records:
                self._records[each.name] = self._record(each)

    def _record(self, document: Document) -> Record:
        contents, state = document.contents, document.state
        parent = None if contents["parent"] is None else self._records[contents["parent"]]
        if parent is not None:
            parent.followers += 1
        record = Record(
            id=document.name,
            owner=document.owner,
            tree=self._tree(contents),
            parent=parent,
            conversation_id=contents["conversation"],
            instructions=contents["instructions"],
            tools=tuple(contents["tools"]),
            messages=_messages(contents),
            input_items=contents["input_items"],
            body=contents["body"],
            session=None,
            variables=contents.get("variables", ""),  # there were none when the first were stored
            children=state["children"],
            newest_child=state["newest_child"],
            is_listed=state["is_listed"],
        )
        if state["session"] is not None:
            record.session = self._session(record, *state["session"])
        return record

    def _session(self, record: Record, session_id: str, length: int, closed: bool) -> TextSession | None:
        """The session in which the record can be continued, if it is there as it was left."""
        if self._sessions.get(session_id) != (record.owner, length):
            return None
        system = [] if record.instructions is None else [Message("system", record.instructions)]
        messages = (*system, *record.conversation_messages())
        tools = written_tools([function_tool(tool) for tool in record.tools])
        ends, variables = self._end_token_ids(), record.variables
        return TextSession(record.owner, ends, messages, closed, tools, session_id, length, variables)

    def _tree(self, contents: Mapping[str, Any]) -> Tree:
        tree = self._trees[contents["tree"]]
        tree.id = contents["tree"]
        return tree


def _messages(contents: Mapping[str, Any]) -> tuple[Message, ...]:
    return tuple(map(read_message, contents["messages"]))

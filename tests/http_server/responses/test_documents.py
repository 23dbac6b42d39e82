"""Responses and conversations as documents: what is written is read back, and what is lost is told."""

import json
from dataclasses import replace
from typing import Any

import pytest

from kakeya.http_server.responses.documents import Reader, conversation_document, record_document
from kakeya.http_server.responses.records import Conversation, Record
from kakeya.http_server.text_sessions import TextSession
from kakeya.types import Document
from support.http_clients import record_of

NOBODY: dict[str, Any] = {}


def stored(document: Document) -> Document:
    """As JSON has it."""
    contents, state = json.loads(json.dumps([document.contents, document.state]))
    return replace(document, contents=contents, state=state)


def documents(*records: Record) -> list[Document]:
    return [stored(record_document(record, 5.0, whole=True)) for record in records]


def reader(found: dict[str, Any] = NOBODY) -> Reader:
    return Reader(found, lambda: frozenset({2}))


def chain() -> list[Record]:
    first = record_of("a", instructions="Be brief.", is_listed=True)
    second = record_of("b", first, children=1, newest_child="c", instructions="Be brief.")
    second.session = TextSession("me", frozenset({2}), (), True, "", "s", 9)
    return [first, second, record_of("c", second, session=None)]


def test_a_chain_is_read_in_any_order() -> None:
    first, second, third = chain()
    read = reader({"s": ("me", 9)}).records(documents(third, first, second))
    assert [record.id for record in read] == ["c", "a", "b"]
    last = read[0]
    assert [record.id for record in last.chain()] == ["a", "b", "c"]
    assert last.conversation_messages() == third.conversation_messages()
    assert last.items() == third.items()
    again = read[2]
    assert (again.children, again.newest_child, again.followers, again.is_listed) == (1, "c", 1, False)
    assert again.tree is last.tree
    assert again.session is not None
    assert (again.session.session_id, again.session.history_length, again.session.closed) == ("s", 9, True)
    assert [message.content for message in again.session.messages] == ["Be brief.", "a", "A", "b", "B"]


@pytest.mark.parametrize("found", [{}, {"s": ("me", 10)}, {"s": ("somebody", 9)}])
def test_a_session_that_is_not_as_it_was_is_not_used(found: dict[str, Any]) -> None:
    assert [record.session for record in reader(found).records(documents(*chain()))] == [None] * 3


def test_what_is_lost_is_told(caplog: pytest.LogCaptureFixture) -> None:
    first, second, third = chain()
    conversation = Conversation("me", {"x": "y"}, [{"id": "i"}], (), first.tree, id="conv")
    conversation.move_to(third)
    written = stored(conversation_document(conversation, 5.0, whole=True))
    whole, cut = reader(), reader()
    assert cut.records(documents(first, third)) == [cut._records["a"]]
    assert "response c is lost: response b is not stored" in caplog.text
    assert cut.conversation(written) is None
    assert "conversation conv is lost: response c is not stored" in caplog.text
    whole.records(documents(first, second, third))
    again = whole.conversation(written)
    assert again is not None
    assert again.head is not None
    assert (again.head.id, again.head.claims, again.metadata) == ("c", 1, {"x": "y"})
    assert again.all_items() == conversation.all_items()
    assert again.created_at == conversation.created_at
    assert conversation_document(conversation, 5.0, whole=False).contents is None

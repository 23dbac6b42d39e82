"""What is noted is stored: at once where somebody waits for it, else soon, and later where it fails."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest

from kakeya.errors import StorageFailed
from kakeya.http_server.archive import Archive, message_fields, read_message
from kakeya.runtime import Runtime
from kakeya.text.prompting import Message, ToolCall
from kakeya.types import Document


class Kept:
    """The documents of a runtime, whose disk is full for a while."""

    has_documents = True

    def __init__(self, full: int = 0) -> None:
        self.full = full
        self.documents: dict[str, Document] = {}
        self.writes: list[list[str]] = []

    def change_documents(
        self, put: Sequence[Document], delete: Sequence[tuple[str, str]] = ()
    ) -> "Future[None]":
        reply: Future[None] = Future()
        if self.full:
            self.full -= 1
            reply.set_exception(StorageFailed("full"))
            return reply
        self.writes.append([*(each.name for each in put), *(f"-{name}" for _, name in delete)])
        self.documents |= {each.name: each for each in put}
        reply.set_result(None)
        return reply


def archive(kept: Kept) -> Archive:
    return Archive(cast(Runtime, kept), retry_s=0.01)


def document(name: str, whole: bool, state: object = 0) -> Document:
    return Document("k", name, "me", {"a": 1} if whole else None, state, 0.0)


def test_all_that_was_noted_is_one_write() -> None:
    kept = Kept()

    async def scenario() -> None:
        notes = archive(kept)
        notes.note("k", "a", lambda whole: document("a", whole), whole=True)
        notes.note("k", "a", lambda whole: document("a", whole, 2))
        notes.note("k", "b", lambda whole: None)
        await notes.flush()
        await notes.flush()

    asyncio.run(scenario())
    assert kept.writes == [["a", "-b"]]
    assert kept.documents["a"] == document("a", True, 2)


def test_what_nobody_waits_for_is_stored_soon_and_again_after_a_failure() -> None:
    kept = Kept(full=3)

    async def scenario() -> None:
        notes = archive(kept)
        notes.note("k", "a", lambda whole: document("a", whole), whole=True)
        with pytest.raises(StorageFailed):
            await notes.flush()
        notes.note("k", "a", lambda whole: document("a", whole, 2))
        while not kept.writes:
            await asyncio.sleep(0.005)
        notes.note("k", "z", lambda whole: document("z", whole))
        await notes.settle()
        notes.note("k", "late", lambda whole: document("late", whole))
        await asyncio.sleep(0.03)

    asyncio.run(scenario())
    assert kept.writes == [["a"], ["z"]]
    assert kept.documents["a"] == document("a", True, 2), "its contents were still to be stored"


def test_without_a_state_directory_nothing_is_noted() -> None:
    notes = Archive()
    notes.note("k", "a", lambda whole: document("a", whole))  # needs no event loop
    asyncio.run(notes.flush())


@pytest.mark.parametrize(
    "message",
    [
        Message("user", "hello"),
        Message("assistant", "", (ToolCall("c", "f", "{}"),)),
        Message("tool", "x", (), "c", "f"),
    ],
)
def test_messages_are_read_as_they_were_written(message: Message) -> None:
    fields: dict[str, Any] = message_fields(message)
    assert read_message(fields) == message

"""Responses, conversations and held chats outlive the server, whether it ended or was killed."""

import sqlite3
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kakeya.config import RuntimeConfig, StateConfig
from kakeya.errors import StorageFailed
from kakeya.types import Document
from support.crashes import Crashed, crash_copies
from support.http_clients import (
    ENGINE,
    OWNER,
    Responding,
    Talker,
    assistant,
    cached,
    content_of,
    history,
    responding,
    text_of,
    user,
)
from support.http_serving import ANY_PORT, eventually

SECRET = "XYZZYPLUGH"
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CHAT = {"max_tokens": 6, "temperature": 0}


def durable(directory: Path, **fields: Any) -> RuntimeConfig:
    return RuntimeConfig(state=StateConfig(directory, **fields))


@pytest.fixture
def crashed(monkeypatch: pytest.MonkeyPatch) -> Crashed:
    return crash_copies(monkeypatch)


def talker(api: Responding) -> Talker:
    return Talker(api.http, api.runtime.describe().model)


def documents(directory: Path) -> dict[str, set[str]]:
    """The names of all documents, by kind."""
    with closing(sqlite3.connect(directory / "sessions.db")) as db:
        rows = db.execute("SELECT kind, name FROM documents").fetchall()
    return {kind: {name for each, name in rows if each == kind} for kind, _ in rows}


def holds(directory: Path, words: str) -> bool:
    """Whether any file has these words."""
    return any(words.encode() in path.read_bytes() for path in directory.rglob("*") if path.is_file())


class Story:
    """A chain with tools, a conversation and a chat; then what comes next in each of them."""

    def __init__(self, api: Responding) -> None:
        self.first = api.ask("Hello", instructions="Be brief.", tools=[TOOL], tool_choice="none")
        self.second = api.ask("Again", previous_response_id=self.first["id"], tool_choice="none")
        self.conversation = api.http.post("/v1/conversations", json={"metadata": {"a": "b"}}).json()["id"]
        api.ask("Hi", conversation=self.conversation)
        api.http.post(f"/v1/conversations/{self.conversation}", json={"metadata": {"c": "d"}})
        chat = talker(api).chat([user("Hello")], **CHAT)
        self.messages = [user("Hello"), assistant(content_of(chat)), user("And then?")]
        self.shown = self.look(api)

    def look(self, api: Responding) -> list[Any]:
        items = f"/v1/conversations/{self.conversation}/items"
        paths = ("/v1/conversations", items, f"/v1/responses/{self.first['id']}")
        return [api.http.get(path).json() for path in paths]

    def go_on(self, api: Responding) -> tuple[list[str], list[int]]:
        """What is said next, and how much of the history before was cached."""
        answers = [
            api.ask("More", previous_response_id=self.second["id"], tool_choice="none"),
            api.ask("Otherwise", previous_response_id=self.first["id"], tool_choice="none"),
            api.ask("Well?", conversation=self.conversation),
        ]
        chat = talker(api).chat(self.messages, **CHAT)
        said = [*map(text_of, answers), content_of(chat)]
        return said, [*map(cached, answers), chat["usage"]["prompt_tokens_details"]["cached_tokens"]]


@pytest.fixture(scope="module")
def uninterrupted(chat_model: Path) -> tuple[list[str], list[int]]:
    with responding(chat_model) as api:
        return Story(api).go_on(api)


@pytest.mark.parametrize("is_killed", [False, True], ids=["ended", "killed"])
def test_all_goes_on_where_it_stood(
    chat_model: Path,
    tmp_path: Path,
    uninterrupted: tuple[list[str], list[int]],
    crashed: Crashed,
    is_killed: bool,
) -> None:
    with responding(chat_model, sessions=durable(tmp_path / "a")) as api:
        story = Story(api)
        gone = api.ask("Forget this")["id"]
        api.http.delete(f"/v1/responses/{gone}")
        sessions = api.sessions()
        place = crashed(tmp_path / "a", tmp_path / "b") if is_killed else tmp_path / "a"
    with responding(chat_model, sessions=durable(place)) as api:
        assert api.sessions() == sessions
        assert story.look(api) == story.shown
        assert api.refused(404, input="x", previous_response_id=gone)["code"] == "previous_response_not_found"
        said, computed_before = story.go_on(api)
        assert said == uninterrupted[0]
        # After a crash, what no snapshot had yet is computed again, in the same sessions.
        assert is_killed or computed_before == uninterrupted[1]
        assert set(sessions) < set(api.sessions())


def test_what_was_being_answered_can_be_asked_again(
    chat_model: Path, tmp_path: Path, crashed: Crashed
) -> None:
    """A server dies in the middle of a response and of a chat: what they went on from is as it was."""
    with responding(chat_model, sessions=durable(tmp_path / "a")) as api:
        first = api.ask("Hello")
        chat = talker(api).chat([user("Hello")], **CHAT)
        messages = [user("Hello"), assistant(content_of(chat)), user("And then?")]
        asked = {"previous_response_id": first["id"], "stream": True, "max_output_tokens": 5000}
        with (
            api.http.stream("POST", "/v1/responses", json={"input": "Again", **asked}) as answer,
            talker(api).streaming(messages=messages, max_tokens=5000) as chunks,
        ):
            lines = answer.iter_lines()
            assert any("delta" in line for line in lines)
            assert any("content" in next(chunks) for _ in range(9))
            place = crashed(tmp_path / "a", tmp_path / "b")
        expected = text_of(api.ask("Again", previous_response_id=first["id"]))
        chatted = content_of(talker(api).chat(messages, **CHAT))
    with responding(chat_model, sessions=durable(place)) as api:
        assert list(api.sessions().values()) == [history(first)], "what nothing leads to is closed"
        assert text_of(api.ask("Again", previous_response_id=first["id"])) == expected
        assert content_of(talker(api).chat(messages, **CHAT)) == chatted


def test_what_is_deleted_is_not_in_any_file(chat_model: Path, tmp_path: Path) -> None:
    with responding(
        chat_model, sessions=durable(tmp_path), config=replace(ANY_PORT, held_seconds=0.3)
    ) as api:
        first = api.ask(f"{SECRET} one")
        second = api.ask(f"{SECRET} two", previous_response_id=first["id"])
        assert holds(tmp_path, f"{SECRET} one")
        api.http.delete(f"/v1/responses/{first['id']}")
        assert documents(tmp_path)["response"] == {first["id"], second["id"]}, (
            "the second stands on the first"
        )
        api.http.delete(f"/v1/responses/{second['id']}")
        assert not holds(tmp_path, SECRET)
        items = [{"type": "message", "role": "user", "content": SECRET}]
        conversation = api.http.post("/v1/conversations", json={"items": items}).json()["id"]
        said = api.ask("Hi", conversation=conversation)["id"]
        fork = api.http.post(f"/v1/conversations/{conversation}/fork").json()["id"]
        api.http.delete(f"/v1/conversations/{conversation}")
        assert holds(tmp_path, SECRET)
        assert documents(tmp_path) == {"response": {said}, "conversation": {fork}}
        api.http.delete(f"/v1/conversations/{fork}")
        api.http.delete(f"/v1/responses/{said}")
        assert not holds(tmp_path, SECRET)
        talker(api).chat([user(SECRET)], **CHAT)
        eventually(lambda: not documents(tmp_path) and not api.sessions())
        eventually(lambda: not holds(tmp_path, SECRET))


def test_limits_hold_across_restarts(chat_model: Path, tmp_path: Path) -> None:
    config = replace(ANY_PORT, stored_responses=3, held_conversations=2)
    with responding(chat_model, config=config, sessions=durable(tmp_path)) as api:
        chain = [api.ask("Hello")]
        for turn in range(4):
            chain.append(api.ask(f"Question {turn}", previous_response_id=chain[-1]["id"]))
        for text in ("One", "Two"):
            talker(api).chat([user(text)], **CHAT)
    names = [response["id"] for response in chain]
    with responding(chat_model, config=config, sessions=durable(tmp_path)) as api:
        statuses = [api.http.get(f"/v1/responses/{name}").status_code for name in names]
        assert statuses == [404, 404, 200, 200, 200]
        last = api.ask("And?", previous_response_id=names[-1])
        assert cached(last) == history(chain[-1]) - 1
        assert api.http.get(f"/v1/responses/{names[2]}").status_code == 404
        talker(api).chat([user("Three")], **CHAT)
        eventually(lambda: len(documents(tmp_path)["chat"]) == 2)  # who is let go is noted, and stored soon
        assert documents(tmp_path)["response"] == {*names, last["id"]}, "the newest stands on all of them"
        for name in (*names[3:], last["id"]):
            api.http.delete(f"/v1/responses/{name}")
        assert "response" not in documents(tmp_path)


def test_what_nobody_uses_expires_across_restarts(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = durable(tmp_path, hibernated_ttl_s=8000.0)
    with responding(chat_model, sessions=settings) as api:
        response = api.ask("Hello")
        conversation = api.http.post("/v1/conversations", json={}).json()["id"]
        talker(api).chat([user("Hello")], **CHAT)
    later = time.time() + 100_000
    monkeypatch.setattr(time, "time", lambda: later)
    with responding(chat_model, sessions=settings) as api:
        # Chats are a cache. The clock may have jumped, so of the rest something is left of its time.
        assert len(api.sessions()) == 1
        assert "chat" not in documents(tmp_path)
        assert api.http.get(f"/v1/responses/{response['id']}").status_code == 200
        assert api.http.get(f"/v1/conversations/{conversation}").status_code == 200
        store = api.server.state.require_loaded().responses.store
        store._clock = lambda: time.monotonic() + 3700
        assert api.http.get(f"/v1/responses/{response['id']}").status_code == 404
        eventually(lambda: documents(tmp_path) == {})


def test_nothing_is_readable_when_it_is_encrypted(chat_model: Path, tmp_path: Path) -> None:
    key, place = tmp_path / "key", tmp_path / "state"
    key.write_bytes(b"k" * 32)
    settings = durable(place, key_file=key)
    with responding(chat_model, sessions=settings) as api:
        first = api.ask(SECRET, metadata={"note": SECRET}, instructions=SECRET)
        api.http.post("/v1/conversations", json={"metadata": {"note": SECRET}})
        messages = [user(SECRET)]
        messages.append(assistant(content_of(talker(api).chat(messages, **CHAT))))
        assert not holds(place, SECRET)
    assert not holds(place, SECRET)
    with responding(chat_model, sessions=settings) as api:
        assert api.http.get(f"/v1/responses/{first['id']}").json() == first
        assert cached(api.ask("Again", previous_response_id=first["id"])) == history(first) - 1
        again = talker(api).chat([*messages, user("Again")], **CHAT)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_what_cannot_be_stored_is_refused_until_it_can(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with responding(chat_model, sessions=durable(tmp_path)) as api:
        first = api.ask("Hello")
        conversation = api.http.post("/v1/conversations", json={"metadata": {"a": "b"}}).json()["id"]
        api.http.post(f"/v1/conversations/{conversation}", json={"metadata": {"a": "c"}})
        change = api.runtime.change_documents

        def full(put: Sequence[Document], delete: Sequence[tuple[str, str]] = ()) -> "Future[None]":
            reply: Future[None] = Future()
            reply.set_exception(StorageFailed("the disk is full"))
            return reply

        monkeypatch.setattr(api.runtime, "change_documents", full)
        assert "the disk is full" in api.refused(429, input="Again", conversation=conversation)["message"]
        assert "the disk is full" in api.refused(429, input="Again")["message"]
        for path in ("", f"/{conversation}", f"/{conversation}/fork"):
            assert api.http.post(f"/v1/conversations{path}", json={"metadata": {"x": "y"}}).status_code == 429
        assert api.http.delete(f"/v1/responses/{first['id']}").status_code == 429
        talker(api).chat([user("Hello")], **CHAT)  # nobody was told that it is held
        monkeypatch.setattr(api.runtime, "change_documents", change)
        (listed,) = api.http.get("/v1/conversations").json()["data"]
        assert (listed["metadata"], listed["message_count"]) == ({"a": "c"}, 0)
        answer = api.ask("Again", conversation=conversation)
        assert documents(tmp_path)["response"] == {answer["id"]}
        assert len(documents(tmp_path)["chat"]) == 1


def test_a_session_that_a_client_named_is_nobody_elses(chat_model: Path, tmp_path: Path) -> None:
    with responding(chat_model, sessions=durable(tmp_path)) as api:
        own = api.runtime.create_session(owner=OWNER, client_label="chat completion")
        conversation = api.http.post("/v1/conversations", json={}).json()["id"]
        api.ask("Hi", conversation=conversation)
        session = api.http.get(f"/v1/conversations/{conversation}").json()["session_id"]
        fork = api.runtime.fork(session, owner=OWNER)[0]
        api.http.delete(f"/v1/conversations/{conversation}")
    with responding(chat_model, sessions=durable(tmp_path)) as api:
        assert set(api.sessions()) == {own, fork}


def test_more_conversations_than_slabs(chat_model: Path, tmp_path: Path) -> None:
    engine = replace(ENGINE, capacity=2)
    with responding(chat_model, engine, sessions=durable(tmp_path)) as api:
        firsts = [api.ask(f"Hello {number}") for number in range(6)]
        for first in firsts:
            assert cached(api.ask("Again", previous_response_id=first["id"])) == history(first) - 1

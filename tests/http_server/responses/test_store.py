"""What is remembered of responses and conversations, and for how long."""

from typing import Any

import pytest

from kakeya.http_server.responses.records import Conversation, Record, Tree
from kakeya.http_server.responses.store import ResponseStore
from kakeya.text.prompting import Message
from support.http_clients import record_of


class Clock:
    """A clock that only moves when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def gone() -> list[str]:
    return []


@pytest.fixture
def store(clock: Clock, gone: list[str]) -> ResponseStore:
    return ResponseStore(3, 16.0, lambda record: gone.append(record.id), clock)


def record(store: ResponseStore, name: str, parent: Record | None = None, **fields: Any) -> Record:
    made = record_of(name, parent, **fields)
    store.add(made)
    return made


def conversation(store: ResponseStore, name: str, head: Record | None = None) -> Conversation:
    made = Conversation("me", {}, [], (), Tree() if head is None else head.tree, id=name)
    made.move_to(head)
    store.add_conversation(made)
    return made


def test_a_chain_knows_all_that_was_said(store: ResponseStore) -> None:
    last = record(store, "c", record(store, "b", record(store, "a")))
    assert [each.id for each in last.chain()] == ["a", "b", "c"]
    assert [message.content for message in last.conversation_messages()] == ["a", "A", "b", "B", "c", "C"]
    assert [item["id"] for item in last.items()] == ["a", "A", "b", "B", "c", "C"]
    assert last.item_count == 6


def test_continued_responses_give_way_and_heads_do_not(store: ResponseStore, gone: list[str]) -> None:
    chain = record(store, "a")
    for name in "bcd":
        chain = record(store, name, chain)
    assert gone == ["a"]
    for name in "xyz":
        record(store, name)
    assert gone == ["a", "b", "c"], "x, y, z and d all have a session to go on with"
    assert store.record("me", "d") is chain
    chain.session = None
    record(store, "w")
    assert gone[3:] == ["d"], "without a session it is as any other"


def test_where_a_conversation_stands_does_not_give_way(store: ResponseStore, gone: list[str]) -> None:
    place = record(store, "a")
    conversation(store, "talk", place)
    chain = place
    for name in "bcd":
        chain = record(store, name, chain)
    assert gone == ["b"]
    assert store.record("me", "a") is place


def test_what_takes_too_much_gives_way(clock: Clock, gone: list[str]) -> None:
    store = ResponseStore(100, None, lambda record: gone.append(record.id), clock, most_bytes=5000)
    record(store, "a", session=None, messages=(Message("user", "x" * 3000),))
    record(store, "b", session=None, messages=(Message("user", "x" * 1000),))
    assert gone == []
    last = record(store, "c", session=None, messages=(Message("user", "x" * 6000),))
    assert gone == ["a", "b"], "the newest stays, however long it is"
    token = {"top_logprobs": [{}] * 4}
    part = {"type": "output_text", "text": "", "logprobs": [token, token]}
    heavy = record(store, "d", last, session=None, body={"output": [{"id": "m", "content": [part]}]})
    assert gone == ["a", "b", "c"]
    assert heavy.size >= 10 * 500
    store.remove(heavy)
    assert part["logprobs"] == [], "what is left of it is only what was said"


def test_owners_do_not_share_a_bound(store: ResponseStore, gone: list[str]) -> None:
    for name in "abcdef":
        record(store, name, owner=name, session=None)
    assert gone == []
    assert store.record("me", "a") is None
    assert store.record("a", "a") is not None


def test_what_is_unused_is_forgotten_as_a_whole(store: ResponseStore, gone: list[str], clock: Clock) -> None:
    first = record(store, "a")
    record(store, "b", first)
    kept = record(store, "x")
    head = conversation(store, "talk", kept)
    lonely = conversation(store, "lonely")
    clock.now = 10
    store.use(head)
    assert store.conversations("me") == [head, lonely]
    clock.now = 15.9
    assert store.record("me", "a") is first
    clock.now = 17
    assert store.record("me", "a") is None
    assert sorted(gone) == ["a", "b"]
    assert store.conversations("me") == [head]
    assert store.conversation("me", "lonely") is None
    assert store.record("me", "x") is kept, "its conversation was used"
    clock.now = 30
    assert store.record("me", "x") is None
    assert store.conversation("me", "talk") is None
    assert sorted(gone) == ["a", "b", "x"]


def test_what_is_in_use_is_not_swept(store: ResponseStore, gone: list[str], clock: Clock) -> None:
    talk = conversation(store, "talk", record(store, "a"))
    talk.is_busy = True
    clock.now = 100
    assert store.conversation("me", "talk") is talk
    assert gone == [], "it is still being answered"
    talk.is_busy = False
    clock.now = 200
    assert store.conversations("me") == []
    assert gone == ["a"]


def test_nothing_expires_without_a_limit(clock: Clock) -> None:
    store = ResponseStore(3, None, lambda record: None, clock)
    kept = record(store, "a")
    clock.now = 1e9
    assert store.record("me", "a") is kept


def test_a_removed_response_makes_its_parent_a_head_again(store: ResponseStore, gone: list[str]) -> None:
    first = record(store, "a")
    second = record(store, "b", first)
    assert (first.is_head, first.is_left_behind, second.is_head) == (False, True, True)
    store.remove(second)
    assert gone == ["b"]
    assert first.is_head
    third = record(store, "c", first)
    record(store, "d", third)
    store.remove(third)
    assert not first.is_head, "what continued the removed one is still there"


def test_a_conversation_keeps_its_place_until_the_last_leaves(store: ResponseStore, gone: list[str]) -> None:
    place = record(store, "a")
    one, other = conversation(store, "one", place), conversation(store, "other", place)
    store.remove(place)
    assert gone == []
    store.remove_conversation(one)
    assert gone == []
    store.remove_conversation(other)
    assert gone == ["a"]


def test_titles_are_the_first_words(store: ResponseStore) -> None:
    talk = conversation(store, "talk")
    assert talk.title == ""
    talk.items.append({"id": "1", "role": "user", "content": []})
    talk.items.append({"id": "2", "role": "user", "content": [{"text": "a word\n" * 20}]})
    assert talk.title == ("a word " * 20)[:59] + "…"


def test_a_newer_attempt_takes_an_older_ones_place(store: ResponseStore) -> None:
    first = record(store, "a")
    attempts = [record(store, name, first) for name in "bcd"]
    assert [attempt.is_left_behind for attempt in attempts] == [True, True, False]
    conversation(store, "talk", attempts[1])
    assert [attempt.is_left_behind for attempt in attempts] == [True, False, False]
    assert not any(attempt.is_lone for attempt in attempts)


def test_a_head_whose_session_must_have_expired_gives_way(
    store: ResponseStore, gone: list[str], clock: Clock
) -> None:
    first = record(store, "a")
    record(store, "b", first)
    clock.now = 15
    store.use(first)
    record(store, "c", first)
    clock.now = 20
    record(store, "d", first)
    assert gone == ["b"], "nobody used it for long, though others used its tree"


def test_a_lone_response_is_the_first_of_nothing(store: ResponseStore) -> None:
    first = record(store, "a")
    assert first.is_lone
    second = record(store, "b", first)
    assert not first.is_lone
    assert not second.is_lone
    claimed = record(store, "c")
    conversation(store, "talk", claimed)
    assert not claimed.is_lone

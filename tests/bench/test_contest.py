"""The same chats to several servers: what is made of their outcomes."""

import pytest

from kakeya.bench.arrivals import Outcome
from kakeya.bench.contest import Chats, Played, of_each, tokens_a_second
from kakeya.errors import RemoteError


def test_a_chat_that_fails_ends_the_run() -> None:
    good = Outcome([0.1, 0.2], 0.3, tokens=3, failure=None)
    assert tokens_a_second([good]) == pytest.approx(10.0)
    with pytest.raises(RemoteError, match="a chat was not answered: broken"):
        tokens_a_second([good, Outcome(failure="broken")])


def test_a_session_that_ends_sooner_counts_though_another_goes_on() -> None:
    slow = Outcome([1.0, 2.0], 11.0, tokens=11, failure=None)
    quick = Outcome([1.0, 2.0], 6.0, tokens=11, failure=None)
    silent = Outcome([], 0.5, tokens=1, failure=None)
    assert tokens_a_second([slow, slow]) == pytest.approx(2.0)
    assert tokens_a_second([slow, quick]) == pytest.approx(2 * 20 / 15)
    assert tokens_a_second([silent]) == 0.0


def test_answers_that_ended_by_themselves_have_a_speed_of_their_own() -> None:
    cut = Outcome([0.1], 9.1, tokens=10, failure=None, finish_reason="length")
    slow = Outcome([1.0, 2.0], 3.0, tokens=9, failure=None, finish_reason="stop")
    quick = Outcome([1.0], 2.0, tokens=17, failure=None, finish_reason="stop")
    played = Played({}, {"mine": [cut, slow, quick], "theirs": [cut]})
    assert played.ended("mine") == [slow, quick]
    assert of_each(played.ended("mine")) == pytest.approx(24 / 3)
    assert of_each(played.ended("theirs")) == 0.0


def test_chats_of_one_kind_differ_in_text_and_seed() -> None:
    chats = Chats("edit", 0.7, 2, 9)
    first, second = chats.arrivals()
    assert first.messages != second.messages
    assert [each.fields["seed"] for each in (first, second)] == [0, 1]
    assert (first.max_tokens, first.fields["temperature"]) == (9, 0.7)
    third, fourth = chats.arrivals(turn=1)
    assert third.messages not in (first.messages, second.messages, fourth.messages)
    assert [each.fields["seed"] for each in (third, fourth)] == [2, 3]
    assert chats.label() == "edit, temperature 0.7, 2 sessions"


def test_answers_are_compared_and_drafts_are_counted() -> None:
    mine = [Outcome(text="a", tokens=3, accepted_tokens=2, rejected_tokens=1), Outcome(text="b", tokens=4)]
    theirs = [Outcome(text="a"), Outcome(text="c")]
    played = Played({}, {"mine": mine, "theirs": theirs})
    assert played.same("mine", "theirs") == 0.5
    assert (played.accepted("mine"), played.proposed("mine"), played.tokens("mine")) == (2, 3, 7)

"""A conversation that is resent goes on in its session: the same tokens, and only what is new is computed."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kakeya.config import Quotas, RuntimeConfig
from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from kakeya.serving.config import HttpConfig
from kakeya.serving.keys import hash_key, owner_name
from support.http_clients import Talker, assistant, content_of, letter_bias, logprobs_of, user
from support.http_serving import ANY_PORT, client_of, eventually, serving_http
from support.serving import ENGINE

EXACT = replace(ENGINE, capacity=6)
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def matching(model: Path) -> Iterator[tuple[HttpServer, Runtime]]:
    with serving_http(model, engine=EXACT) as live:
        yield live


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[tuple[HttpServer, Runtime]]:
    with serving_http(model, replace(ANY_PORT, chat_matching=False), EXACT) as live:
        yield live


@pytest.fixture
def talker(matching: tuple[HttpServer, Runtime]) -> Iterator[Talker]:
    server, runtime = matching
    with client_of(server) as client:
        yield Talker(client, runtime.describe().model)
    close_all(runtime)


def close_all(runtime: Runtime) -> None:
    for info in runtime.list_sessions(owner="local")[0]:
        runtime.close_session(info.session_id, owner="local")


def sessions(runtime: Runtime, owner: str = "local") -> list[str]:
    return [info.session_id for info in runtime.list_sessions(owner=owner)[0]]


def converse(
    talker: Talker, turns: int, messages: list[dict[str, Any]], **fields: Any
) -> list[dict[str, Any]]:
    """The bodies of so many turns, the whole history sent each time."""
    bodies = []
    for turn in range(turns):
        messages = [*messages, user(f"Question {turn}")]
        bodies.append(talker.chat(messages, **fields))
        messages = [*messages, assistant(content_of(bodies[-1]))]
    return bodies


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"temperature": 1.2, "seed": 7}])
@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("opening", [[], [SYSTEM]])
def test_matched_and_resent_conversations_are_the_same_to_the_bit(
    matching: tuple[HttpServer, Runtime],
    plain: tuple[HttpServer, Runtime],
    settings: dict[str, Any],
    ends: bool,
    opening: list[dict[str, Any]],
) -> None:
    told = []
    for server, runtime in (matching, plain):
        with client_of(server) as client:
            bias = letter_bias(runtime)
            if ends:  # sooner or later
                bias = {"0": 100, **dict.fromkeys(bias, 92)}
            fields = {"logprobs": True, "top_logprobs": 3, "logit_bias": bias, "max_tokens": 7, **settings}
            fields["frequency_penalty"] = 2  # what was said counts, and makes the model say something else
            bodies = converse(Talker(client, runtime.describe().model), 5, opening, **fields)
        told.append([(body["choices"][0], body["usage"]["prompt_tokens"]) for body in bodies])
        cached = [body["usage"]["prompt_tokens_details"]["cached_tokens"] for body in bodies]
        assert (min(cached[1:]) > 0) == (server is matching[0])
    close_all(matching[1])
    assert told[0] == told[1]
    assert {choice["finish_reason"] for choice, _ in told[0]} >= ({"stop"} if ends else {"length"})
    assert sessions(plain[1]) == []


def test_only_the_new_message_is_computed(talker: Talker, matching: tuple[HttpServer, Runtime]) -> None:
    tokenizer = matching[1].tokenizer
    bodies = converse(talker, 20, [SYSTEM], max_tokens=4, logit_bias=letter_bias(matching[1]))
    usages = [body["usage"] for body in bodies]
    for before, after in pairwise(usages):
        history = before["prompt_tokens"] + before["completion_tokens"]
        # All but the newest token of an answer has been computed when it ends.
        assert after["prompt_tokens_details"]["cached_tokens"] == history - 1
    whole = [SYSTEM]
    for turn, body in enumerate(bodies):
        whole += [user(f"Question {turn}"), assistant(content_of(body))]
    assert usages[-1]["prompt_tokens"] == len(tokenizer.chat_ids(whole[:-1]))
    [session_id] = sessions(matching[1])
    assert usages[-1]["dropped_tokens"] == matching[1].info(session_id).dropped_token_count > 0


def test_a_stream_is_held_before_it_ends(talker: Talker, matching: tuple[HttpServer, Runtime]) -> None:
    bias = letter_bias(matching[1])
    messages = [user("Hello")]
    for turn in range(3):
        said = ""
        with talker.streaming(
            messages=messages, max_tokens=3, logit_bias=bias, stream_options={"include_usage": True}
        ) as events:
            for event in events:
                if event == "[DONE]":
                    break
                chunk = json.loads(event)
                if not chunk["choices"]:
                    cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
                    continue
                said += chunk["choices"][0]["delta"].get("content") or ""
        assert (cached > 0) == (turn > 0)
        messages += [assistant(said), user("And then?")]


def test_what_was_changed_is_not_matched(talker: Talker, matching: tuple[HttpServer, Runtime]) -> None:
    settings = {"max_tokens": 3, "logit_bias": letter_bias(matching[1]), "temperature": 0}
    said = content_of(talker.chat([user("Hello")], **settings))
    for changed in (
        [user("Hallo"), assistant(said)],
        [user("Hello"), assistant(said + "!")],
        [SYSTEM, user("Hello"), assistant(said)],
        [user("Hello"), user(said)],
    ):
        body = talker.chat([*changed, user("More")], **settings)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    tool = {"type": "function", "function": {"name": "f"}}
    body = talker.chat([user("Hello"), assistant(said), user("More")], tools=[tool], **settings)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = talker.chat([user("Hello"), assistant(said), user("More")], **settings)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_several_new_messages_are_appended_together(
    talker: Talker, plain: tuple[HttpServer, Runtime], matching: tuple[HttpServer, Runtime]
) -> None:
    settings = {"max_tokens": 5, "logit_bias": letter_bias(matching[1]), "temperature": 0, "logprobs": True}
    said = content_of(talker.chat([user("Hello")], **settings))
    longer = [user("Hello"), assistant(said), user("One"), assistant("QQ"), user("Two")]
    body = talker.chat(longer, **settings)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    with client_of(plain[0]) as client:
        assert logprobs_of(Talker(client, talker.model).chat(longer, **settings)) == logprobs_of(body)


def test_of_two_that_fit_the_longer_is_continued(
    talker: Talker, matching: tuple[HttpServer, Runtime]
) -> None:
    settings = {"max_tokens": 3, "logit_bias": letter_bias(matching[1]), "temperature": 0}
    first = talker.chat([user("Hello")], **settings)
    messages = [user("Hello"), assistant(content_of(first)), user("More")]
    second = talker.chat(messages, **settings)
    talker.chat([user("Hello")], **settings)  # held again, the shorter one
    third = talker.chat([*messages, assistant(content_of(second)), user("Still")], **settings)
    history = second["usage"]["prompt_tokens"] + second["usage"]["completion_tokens"]
    assert third["usage"]["prompt_tokens_details"]["cached_tokens"] == history - 1


def test_each_of_several_choices_can_be_continued(
    talker: Talker, matching: tuple[HttpServer, Runtime]
) -> None:
    settings = {"max_tokens": 6, "logit_bias": letter_bias(matching[1]), "seed": 3}
    body = talker.chat([user("Hello")], n=3, **settings)
    for index in range(3):
        messages = [user("Hello"), assistant(content_of(body, index)), user("More")]
        assert talker.chat(messages, **settings)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("reason", ["stop string", "closed", "used by somebody else"])
def test_what_cannot_be_continued_is_written_anew(
    talker: Talker, matching: tuple[HttpServer, Runtime], plain: tuple[HttpServer, Runtime], reason: str
) -> None:
    runtime = matching[1]
    settings = {"logit_bias": letter_bias(runtime), "temperature": 0, "logprobs": True, "max_tokens": 6}
    whole = content_of(talker.chat([user("Hello")], **settings))
    close_all(runtime)
    extra = {"stop": [whole[2]]} if reason == "stop string" else {}
    said = content_of(talker.chat([user("Hello")], **settings, **extra))
    if reason == "stop string":
        assert said == whole[: whole.index(whole[2])]
        assert sessions(runtime) == []
    elif reason == "closed":
        close_all(runtime)
    else:
        runtime.append(sessions(runtime)[0], [5], owner="local")
    messages = [user("Hello"), assistant(said), user("More")]
    body = talker.chat(messages, **settings)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert len(sessions(runtime)) == 1
    with client_of(plain[0]) as client:
        assert logprobs_of(Talker(client, talker.model).chat(messages, **settings)) == logprobs_of(body)


def test_what_is_held_gives_way_to_new_sessions(talker: Talker, matching: tuple[HttpServer, Runtime]) -> None:
    runtime = matching[1]
    settings = {"max_tokens": 2, "logit_bias": letter_bias(runtime), "temperature": 0}
    said = [content_of(talker.chat([user(f"Hello {number}")], **settings)) for number in range(9)]
    assert len(sessions(runtime)) == EXACT.capacity
    cached = [
        talker.chat([user(f"Hello {number}"), assistant(said[number]), user("More")], **settings)["usage"][
            "prompt_tokens_details"
        ]["cached_tokens"]
        for number in (8, 0)
    ]
    assert cached[0] > 0, "the newest was kept"
    assert cached[1] == 0, "the oldest had to go"


def test_named_sessions_never_give_way(talker: Talker, matching: tuple[HttpServer, Runtime]) -> None:
    runtime = matching[1]
    named = [runtime.create_session(owner="local") for _ in range(EXACT.capacity)]
    status, error = talker.refusal(messages=[user("Hello")])
    assert (status, error["code"]) == (429, "rate_limit_exceeded")
    runtime.close_session(named[0], owner="local")
    for number in range(3):
        talker.chat([user(f"Hello {number}")], max_tokens=2)
    assert set(named[1:]) < set(sessions(runtime))


@pytest.mark.parametrize("bounds", [{"held_conversations": 2}, {"held_seconds": 0.3}])
def test_holding_is_bounded(model: Path, bounds: dict[str, Any]) -> None:
    with serving_http(model, replace(ANY_PORT, **bounds), EXACT) as (server, runtime):
        with client_of(server) as client:
            talker = Talker(client, runtime.describe().model)
            for number in range(4):
                talker.chat([user(f"Hello {number}")], max_tokens=2)
        if "held_seconds" in bounds:
            eventually(lambda: sessions(runtime) == [], 5)
        else:
            assert len(sessions(runtime)) == 2


def test_nothing_is_held_where_nothing_may_be(model: Path) -> None:
    with (
        serving_http(model, replace(ANY_PORT, held_conversations=0), EXACT) as (server, runtime),
        client_of(server) as client,
    ):
        Talker(client, runtime.describe().model).chat([user("Hello")], max_tokens=2)
        assert sessions(runtime) == []


def test_owners_never_meet(model: Path) -> None:
    keys = ("first", "second")
    config = HttpConfig(bind="127.0.0.1:0", key_hashes=tuple(map(hash_key, keys)))
    quotas = RuntimeConfig(quotas=Quotas(max_sessions=1))
    with serving_http(model, config, EXACT, quotas) as (server, runtime):
        settings = {"max_tokens": 3, "logit_bias": letter_bias(runtime), "temperature": 0}
        with client_of(server, keys[0]) as one, client_of(server, keys[1]) as two:
            first, second = (Talker(client, runtime.describe().model) for client in (one, two))
            said = content_of(first.chat([user("Hello")], **settings))
            messages = [user("Hello"), assistant(said), user("More")]
            other = second.chat(messages, **settings)
            assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            kept = sessions(runtime, owner_name(hash_key(keys[1])))
            # At its quota an owner's own conversations give way, never another's.
            assert first.chat(messages, **settings)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
            first.chat([user("Something else")], **settings)
            assert sessions(runtime, owner_name(hash_key(keys[1]))) == kept
            [own] = sessions(runtime, owner_name(hash_key(keys[0])))
            runtime.close_session(own, owner=owner_name(hash_key(keys[0])))
            runtime.create_session(owner=owner_name(hash_key(keys[0])))
            status, error = first.refusal(messages=messages)
            assert (status, "max_sessions" in error["message"]) == (429, True)
            assert sessions(runtime, owner_name(hash_key(keys[1]))) == kept


def test_a_refused_continuation_keeps_the_conversation(model: Path) -> None:
    quotas = RuntimeConfig(quotas=Quotas(tokens_per_minute=400))
    with (
        serving_http(model, engine=EXACT, sessions=quotas) as (server, runtime),
        client_of(server) as client,
    ):
        talker = Talker(client, runtime.describe().model)
        settings = {"max_tokens": 3, "logit_bias": letter_bias(runtime), "temperature": 0}
        said = content_of(talker.chat([user("Hello")], **settings))
        status, error = talker.refusal(messages=[user("Hello"), assistant(said), user("x" * 900)], **settings)
        assert (status, "tokens_per_minute" in error["message"]) == (429, True)
        body = talker.chat([user("Hello"), assistant(said), user("More")], **settings)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

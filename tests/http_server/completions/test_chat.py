"""Chat completions: the same tokens as the runtime, every setting honoured, streamed or whole."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from kakeya.text.turns import Turns
from kakeya.types import SamplingParams
from kakeya.wire import runtime_pb2 as pb
from support.http_clients import (
    CHAT,
    Talker,
    assistant,
    content_of,
    counted,
    decoded,
    generated,
    letter_bias,
    logprobs_of,
    spelt,
    streamed_content,
    user,
)
from support.http_serving import client_of, serving_http
from support.serving import ENGINE, connected, serving

HELLO = [user("Hello")]


@pytest.fixture
def talker(server: HttpServer, runtime: Runtime) -> Iterator[Talker]:
    with client_of(server) as client:
        yield Talker(client, runtime.describe().model)


@pytest.mark.parametrize(
    "fields, sampling",
    [
        ({"temperature": 0}, SamplingParams(logprobs=True, top_logprobs=2)),
        (
            {"seed": 11, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
            SamplingParams(1.0, 40, 0.9, 0.01, seed=11, logprobs=True, top_logprobs=2),
        ),
        (
            {
                "seed": -1,
                "temperature": 0.7,
                "presence_penalty": 1.5,
                "frequency_penalty": -0.5,
                "repetition_penalty": 1.3,
                "logit_bias": {"70": 5, "71": -100},
            },
            SamplingParams(
                0.7,
                repetition_penalty=1.3,
                presence_penalty=1.5,
                frequency_penalty=-0.5,
                logit_bias={70: 5.0, 71: -100.0},
                seed=2**64 - 1,
                logprobs=True,
                top_logprobs=2,
            ),
        ),
    ],
)
def test_the_tokens_are_those_of_the_runtime(
    talker: Talker, runtime: Runtime, fields: dict[str, Any], sampling: SamplingParams
) -> None:
    messages = [{"role": "system", "content": "Be kind."}, user("Hi"), assistant("Hello"), user("Bye")]
    body = talker.chat(messages, max_tokens=25, logprobs=True, top_logprobs=2, **fields)
    opening = Turns(runtime.tokenizer, [0]).opening_tokens(messages[:1])
    assert opening > 2, "more than is pinned anyway"
    events = generated(runtime, runtime.tokenizer.chat_ids(messages), 25, sampling, min(opening, 16))
    ended = events[-1].token_id == 0
    shown = events[:-1] if ended else events
    assert [(each["bytes"], each["logprob"]) for each in logprobs_of(body)] == [
        (spelt(runtime, event.token_id), event.logprob) for event in shown
    ]
    assert [
        [(top["bytes"], top["logprob"]) for top in each["top_logprobs"]] for each in logprobs_of(body)
    ] == [[(spelt(runtime, top.token_id), top.logprob) for top in event.top_logprobs] for event in shown]
    assert content_of(body) == decoded(runtime, shown)
    assert body["usage"]["completion_tokens"] == len(events)
    assert body["choices"][0]["finish_reason"] == ("stop" if ended else "length")


def test_a_completion_has_the_shape_clients_expect(talker: Talker, runtime: Runtime) -> None:
    body = talker.chat(HELLO, max_tokens=3, logit_bias=letter_bias(runtime), user="somebody")
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert body["model"] == talker.model
    assert body["system_fingerprint"] == runtime.fingerprint
    [choice] = body["choices"]
    assert choice["index"] == 0
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "length"
    assert choice["message"] == {"role": "assistant", "content": content_of(body), "refusal": None}
    prompt = len(runtime.tokenizer.chat_ids(HELLO))
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 3,
        "total_tokens": prompt + 3,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
        "dropped_tokens": 0,
        "recalled_tokens": 0,
    }


def test_an_end_token_ends_an_answer_and_is_not_shown(talker: Talker, runtime: Runtime) -> None:
    body = talker.chat(HELLO, logit_bias={"0": 100}, temperature=0, logprobs=True)
    assert content_of(body) == ""
    assert logprobs_of(body) == []
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("seed", range(4))
def test_streamed_and_whole_are_the_same(talker: Talker, seed: int) -> None:
    settings = {"seed": seed, "max_tokens": 40, "logprobs": True, "temperature": 2.0}
    body = talker.chat(HELLO, **settings)
    chunks = talker.stream(messages=HELLO, **settings, stream_options={"include_usage": True})
    assert streamed_content(chunks) == content_of(body)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    *said, usage = chunks
    told = [chunk["choices"][0]["logprobs"] for chunk in said]
    assert [each for part in told if part is not None for each in part["content"]] == logprobs_of(body)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in said]
    assert reasons == [None] * (len(said) - 1) + [body["choices"][0]["finish_reason"]]
    assert (usage["choices"], counted(usage)) == ([], counted(body))
    assert {chunk["usage"] for chunk in said} == {None}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_stream_tells_no_usage_that_nobody_asked_for(talker: Talker) -> None:
    chunks = talker.stream(messages=HELLO, max_tokens=3)
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


def test_choices_differ_and_are_each_reproducible(talker: Talker, runtime: Runtime) -> None:
    settings = {"seed": 5, "max_tokens": 12, "n": 3, "logit_bias": letter_bias(runtime), "temperature": 2}
    settings["frequency_penalty"] = 2
    body = talker.chat(HELLO, **settings)
    said = [content_of(body, index) for index in range(3)]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len(set(said)) == 3
    assert body["usage"]["completion_tokens"] == 36
    assert body["usage"]["prompt_tokens"] == len(runtime.tokenizer.chat_ids(HELLO))
    assert content_of(talker.chat(HELLO, **{**settings, "n": 1})) == said[0]
    chunks = talker.stream(messages=HELLO, **settings, stream_options={"include_usage": True})
    assert [streamed_content(chunks, index) for index in range(3)] == said
    assert chunks[-1]["usage"]["completion_tokens"] == 36


def test_without_a_seed_answers_differ(talker: Talker, runtime: Runtime) -> None:
    said = {
        content_of(talker.chat(HELLO, max_tokens=20, logit_bias=letter_bias(runtime), temperature=2.0))
        for _ in range(8)
    }
    assert len(said) > 1, "the same seed every time; two may agree by chance, eight do not"


def test_stop_strings_never_show(talker: Talker, runtime: Runtime) -> None:
    settings = {"max_tokens": 30, "logit_bias": letter_bias(runtime), "seed": 2, "logprobs": True}
    whole = content_of(talker.chat(HELLO, **settings))
    for length in (1, 2, 5):
        stop = whole[7 : 7 + length]
        body = talker.chat(HELLO, **settings, stop=["nothing like it", stop])
        shown = whole[: whole.index(stop)]
        assert content_of(body) == shown
        assert "".join(each["token"] for each in logprobs_of(body)) == shown
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == len(shown) + length
        assert streamed_content(talker.stream(messages=HELLO, **settings, stop=stop)) == shown
    unfinished = talker.chat(HELLO, **settings, stop=whole[-2:] + "never")
    assert content_of(unfinished) == whole
    assert len(logprobs_of(unfinished)) == 30


def test_characters_of_several_tokens_come_whole(talker: Talker, runtime: Runtime) -> None:
    # Only the bytes of é, one token each: what is said is é, and halves of it.
    lead, trail = runtime.tokenizer.encode("é")
    settings = {"max_tokens": 24, "logit_bias": {str(lead): 100, str(trail): 100}, "seed": 1}
    body = talker.chat(HELLO, **settings, logprobs=True)
    data = bytes(byte for each in logprobs_of(body) for byte in each["bytes"])
    assert content_of(body) == data.decode(errors="replace")
    assert "é" in content_of(body)
    chunks = talker.stream(messages=HELLO, **settings)
    assert streamed_content(chunks) == content_of(body)


def test_text_parts_are_joined(talker: Talker, runtime: Runtime) -> None:
    settings = {"max_tokens": 3, "temperature": 0, "logprobs": True}
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert (
        talker.chat([user("Hello")], **settings)["choices"]
        == (talker.chat([{"role": "user", "content": parts}], **settings)["choices"])
    )


def test_a_developer_is_the_system(talker: Talker) -> None:
    settings = {"max_tokens": 3, "temperature": 0, "logprobs": True}
    said = [
        talker.chat([{"role": role, "content": "Be brief."}, *HELLO], **settings)["choices"]
        for role in ("system", "developer")
    ]
    assert said[0] == said[1]


def test_what_the_server_sent_may_come_back(talker: Talker) -> None:
    message = talker.chat(HELLO, max_tokens=3)["choices"][0]["message"]
    more = {"annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    assert talker.chat([*HELLO, {**message, **more}, user("More")], max_tokens=3)["choices"]


def test_harmless_fields_change_nothing(talker: Talker) -> None:
    plain = {"temperature": 0, "max_tokens": 5}
    harmless = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "modalities": ["text"],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "safety_identifier": "x",
        "prompt_cache_key": "y",
        "n": None,
        "stop": None,
        "logit_bias": None,
        "functions": None,
        "audio": None,
        "stream": False,
    }
    assert content_of(talker.chat(HELLO, **plain, **harmless)) == content_of(talker.chat(HELLO, **plain))


def test_the_newer_name_of_max_tokens_counts_as_well(talker: Talker, runtime: Runtime) -> None:
    for fields in (
        {"max_tokens": 4},
        {"max_completion_tokens": 4},
        {"max_tokens": 4, "max_completion_tokens": 4},
    ):
        body = talker.chat(HELLO, logit_bias=letter_bias(runtime), **fields)
        assert body["usage"]["completion_tokens"] == 4


def test_the_route_says_that_it_will_end(talker: Talker) -> None:
    with talker.client.stream(
        "POST", CHAT, json={"model": talker.model, "messages": HELLO, "max_tokens": 1, "stream": True}
    ) as answer:
        assert answer.headers["deprecation"] == "true"
        assert json.loads(next(answer.iter_lines()).removeprefix("data: "))["choices"]


def test_http_and_grpc_say_the_same(model: Path) -> None:
    with (
        serving_http(model) as (http, runtime),
        serving(model) as (grpc, _),
        client_of(http) as client,
        connected(grpc.address) as stub,
    ):
        talker = Talker(client, runtime.describe().model)
        messages = [user("Hello")]
        said = content_of(talker.chat(messages, max_tokens=4, logit_bias=letter_bias(runtime)))
        messages += [assistant(said), user("And?")]
        settings = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 12}
        body = talker.chat(messages, max_tokens=30, logprobs=True, **settings)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

        session_id = stub.CreateSession(pb.CreateSessionRequest()).session_id
        ids = runtime.tokenizer.chat_ids(messages)
        stub.AppendTokens(pb.AppendTokensRequest(session_id=session_id, token_ids=ids))
        request = pb.GenerateRequest(session_id=session_id, max_tokens=30, logprobs=1, **settings)
        events = [event.token for event in stub.Generate(request) if event.WhichOneof("event") == "token"]
        shown = [token for token in events if token.id != 0]
        assert len(shown) > 5
        told = logprobs_of(body)
        assert [spelt(runtime, token.id) for token in shown] == [each["bytes"] for each in told]
        logprobs = [each["logprob"] for each in told]
        assert [token.logprob for token in shown] == pytest.approx(logprobs, rel=1e-6)  # 32 bits on the wire


def test_a_right_prediction_is_accepted_and_a_wrong_one_changes_nothing(
    talker: Talker, runtime: Runtime
) -> None:
    # Letters only, so that the text has one spelling in tokens; and nothing that looking up would find.
    settings = {"temperature": 2.0, "seed": 4, "max_tokens": 48, "logit_bias": letter_bias(runtime)}
    said = content_of(talker.chat(HELLO, **settings))
    accepted = []
    for content in (said, [{"type": "text", "text": "nothing of the kind"}]):
        body = talker.chat(HELLO, **settings, prediction={"type": "content", "content": content})
        assert content_of(body) == said
        accepted.append(body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"])
    assert accepted[0] > accepted[1]


LETTERS = {
    "type": "object",
    "properties": {"word": {"type": "string", "maxLength": 12}},
    "required": ["word"],
}
DRAFTED: dict[str, dict[str, Any]] = {
    "several choices": {"n": 3, "seed": 5, "temperature": 0.1},
    "log-probabilities": {"logprobs": True, "top_logprobs": 2, "temperature": 0},
    "a schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": LETTERS}},
        "temperature": 0,
    },
}


@pytest.fixture(scope="module")
def plainly(model: Path) -> Iterator[tuple[HttpServer, Runtime]]:
    with serving_http(model, engine=replace(ENGINE, proposer="none")) as live:
        yield live


@pytest.mark.parametrize("name", [*DRAFTED, "a stop string"])
def test_drafts_change_no_choice(
    talker: Talker, runtime: Runtime, plainly: tuple[HttpServer, Runtime], name: str
) -> None:
    """Neither its text, nor where and why it ends, nor its log-probabilities."""
    settings = {"max_tokens": 40, "logit_bias": letter_bias(runtime)} | DRAFTED.get(name, {"temperature": 0})
    if name == "a schema":
        del settings["logit_bias"]
    with client_of(plainly[0]) as client:
        plain = Talker(client, plainly[1].describe().model)
        said = content_of(plain.chat(HELLO, **settings))
        if name == "a stop string":
            settings["stop"] = [said[len(said) // 2 :][:2]]
        expected = plain.chat(HELLO, **settings)["choices"]
    body = talker.chat(HELLO, **settings, prediction={"type": "content", "content": said})
    assert body["choices"] == expected
    assert body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0

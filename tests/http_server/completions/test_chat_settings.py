"""Settings of servers for open models: what ends an answer, what of it is shown, how the template writes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from support.http_clients import TEXT, Talker, assistant, content_of, letter_bias, streamed_content, user
from support.http_serving import client_of, serving_http
from support.serving import ENGINE

HELLO = [user("Hello")]


@pytest.fixture(scope="module")
def matching(model: Path) -> Iterator[tuple[HttpServer, Runtime]]:
    with serving_http(model, engine=ENGINE) as live:
        yield live


@pytest.fixture
def runtime(matching: tuple[HttpServer, Runtime]) -> Runtime:
    return matching[1]


@pytest.fixture
def talker(matching: tuple[HttpServer, Runtime]) -> Iterator[Talker]:
    server, runtime = matching
    with client_of(server) as client:
        yield Talker(client, runtime.describe().model)
    for info in runtime.list_sessions(owner="local")[0]:
        runtime.close_session(info.session_id, owner="local")


@pytest.fixture
def letters(runtime: Runtime) -> dict[str, int]:
    return letter_bias(runtime)


@pytest.fixture
def ending(runtime: Runtime) -> dict[str, Any]:
    """It would end at once."""
    [end] = runtime.tokenizer.encode("<|end|>")
    return {"logit_bias": {str(end): 100}, "max_tokens": 6}


def cached(body: dict[str, Any]) -> int:
    count: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def test_ends_are_the_requests_own(talker: Talker, ending: dict[str, Any]) -> None:
    lengths = [
        talker.chat(HELLO, **ending, **ends)["usage"]["completion_tokens"]
        for ends in ({}, {"ignore_eos": True}, {"min_tokens": 3})
    ]
    assert lengths == [1, 6, 4]


def test_ignored_ends_are_shown_where_special_tokens_are(talker: Talker, ending: dict[str, Any]) -> None:
    body = talker.chat(HELLO, **ending, ignore_eos=True)
    assert content_of(body) == ""
    shown = talker.chat(HELLO, **ending, ignore_eos=True, skip_special_tokens=False)
    assert content_of(shown) == "<|end|>" * 6


def test_an_answer_past_an_ignored_end_is_gone_on_with(talker: Talker, letters: dict[str, int]) -> None:
    settings = {"logit_bias": letters, "max_tokens": 6, "ignore_eos": True}
    said = content_of(talker.chat(HELLO, **settings))
    assert cached(talker.chat([*HELLO, assistant(said), user("On")], **settings)) > 6


def test_a_stop_token_ends_and_is_shown_only_if_asked_for(
    talker: Talker, runtime: Runtime, letters: dict[str, int]
) -> None:
    settings = {"logit_bias": letters, "max_tokens": 6, "seed": 4}
    whole = content_of(talker.chat(HELLO, **settings))
    [stop] = runtime.tokenizer.encode(whole[2])
    at = whole.index(whole[2])
    body = talker.chat(HELLO, **settings, stop_token_ids=[stop])
    assert (content_of(body), body["choices"][0]["finish_reason"]) == (whole[:at], "stop")
    # The session has the stop token, which the client was not shown: it is not gone on with.
    said = assistant(content_of(body))
    assert cached(talker.chat([*HELLO, said, user("On")], **settings)) == 0
    shown = talker.chat(HELLO, **settings, stop_token_ids=[stop], include_stop_str_in_output=True)
    assert content_of(shown) == whole[: at + 1]


@pytest.mark.parametrize("path", ["chat", "text"])
def test_a_stop_string_is_part_of_the_answer_if_asked_for(
    talker: Talker, letters: dict[str, int], path: str
) -> None:
    settings: dict[str, Any] = {"logit_bias": letters, "max_tokens": 6, "seed": 4}

    def said(**fields: Any) -> str:
        if path == "chat":
            return content_of(talker.chat(HELLO, **settings, **fields))
        text: str = talker.text("Hello", **settings, **fields)["choices"][0]["text"]
        return text

    whole = said()
    stop = whole[2:4]
    at = whole.index(stop)
    assert said(stop=[stop]) == whole[:at]
    assert said(stop=[stop], include_stop_str_in_output=True) == whole[: at + 2]


@pytest.mark.parametrize("streamed", [{"path": TEXT, "prompt": "Hello"}, {"messages": HELLO}])
def test_every_chunk_counts_so_far(talker: Talker, letters: dict[str, int], streamed: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = talker.stream(**streamed, logit_bias=letters, max_tokens=6, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert (counts[-2], counts[-1]) == (6, 6)
    last = chunks[-1]["usage"]
    for chunk in chunks:
        usage = chunk["usage"]
        assert usage["prompt_tokens"] == last["prompt_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_without_it_only_the_last_chunk_counts(talker: Talker, letters: dict[str, int]) -> None:
    chunks = talker.stream(
        messages=HELLO, logit_bias=letters, max_tokens=4, stream_options={"include_usage": True}
    )
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert streamed_content(chunks)


def test_an_answer_is_continued_and_then_gone_on_with(talker: Talker, letters: dict[str, int]) -> None:
    settings = {"logit_bias": letters, "max_tokens": 5, "seed": 2}
    whole = content_of(talker.chat(HELLO, **settings))
    begun = [*HELLO, assistant(whole[:3])]
    body = talker.chat(
        begun, **{**settings, "max_tokens": 2}, continue_final_message=True, add_generation_prompt=False
    )
    # The same positions and the same seed: it says what it would have said.
    assert content_of(body) == whole[3:]
    after = talker.chat([*HELLO, assistant(whole), user("On")], **settings)
    assert cached(after) == body["usage"]["total_tokens"] - 1


def test_a_conversation_that_opens_no_answer_is_shorter(talker: Talker) -> None:
    opened = talker.chat(HELLO, max_tokens=2)["usage"]["prompt_tokens"]
    assert talker.chat(HELLO, max_tokens=2, add_generation_prompt=False)["usage"]["prompt_tokens"] < opened


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": HELLO, "continue_final_message": True},
        {"messages": [*HELLO, assistant("x")], "continue_final_message": True, "add_generation_prompt": True},
    ],
)
def test_what_cannot_be_continued_is_refused(talker: Talker, fields: dict[str, Any]) -> None:
    status, error = talker.refusal(**fields)
    assert (status, error["param"]) == (400, "continue_final_message")


def test_only_the_same_variables_go_on_with_a_session(talker: Talker, letters: dict[str, int]) -> None:
    settings = {"logit_bias": letters, "max_tokens": 4}
    said = content_of(talker.chat(HELLO, **settings, chat_template_kwargs={"mood": "calm"}))
    longer = [*HELLO, assistant(said), user("On")]
    assert cached(talker.chat(longer, **settings, chat_template_kwargs={"mood": "wild"})) == 0
    assert cached(talker.chat(longer, **settings, chat_template_kwargs={"mood": "calm"})) > 4


def test_advice_that_no_model_hears_changes_nothing(talker: Talker) -> None:
    advice = {"reasoning_effort": "high", "verbosity": "low", "prompt_cache_retention": "24h"}
    plain, advised = (talker.chat(HELLO, max_tokens=5, seed=6, **fields) for fields in ({}, advice))
    assert content_of(plain) == content_of(advised)

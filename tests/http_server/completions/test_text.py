"""Completions: text and tokens continued as the runtime does, and scored as the model thinks."""

import asyncio
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import pytest

from kakeya.engine.backend import LaunchedStep
from kakeya.engine.batch import Segment
from kakeya.errors import ResourceExhausted
from kakeya.http_server import HttpServer
from kakeya.http_server.completions.text import Prompt, PromptSessions
from kakeya.http_server.text_sessions import TextSessions
from kakeya.runtime import Runtime
from kakeya.text import Tokenizer
from kakeya.text.answer import Piece
from kakeya.types import SamplingParams, TokenEvent
from support.http_clients import TEXT, Talker, counted, decoded, generated, letter_bias
from support.http_serving import client_of, eventually
from support.loops import on_a_loop
from support.tiny import sentencepiece_files

PROMPT = "hello world, Größe 日本"


@pytest.fixture
def talker(server: HttpServer, runtime: Runtime) -> Iterator[Talker]:
    with client_of(server) as client:
        yield Talker(client, runtime.describe().model)
    # A client may see the end before the server has put everything away.
    eventually(lambda: runtime.list_sessions(owner="local")[0] == [])
    eventually(lambda: runtime.free_slabs == runtime.describe().capacity)
    eventually(lambda: server.state.admission.running == 0)


def text_of(body: dict[str, Any], index: int = 0) -> str:
    text: str = body["choices"][index]["text"]
    return text


@pytest.mark.parametrize("as_ids", [False, True])
def test_the_tokens_are_those_of_the_runtime(talker: Talker, runtime: Runtime, as_ids: bool) -> None:
    ids = runtime.tokenizer.encode(PROMPT, bos=True)
    body = talker.text(ids if as_ids else PROMPT, max_tokens=30, seed=9, logprobs=0)
    events = generated(runtime, ids, 30, SamplingParams(1.0, seed=9, logprobs=True))
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [event.logprob for event in events]
    assert text_of(body) == decoded(runtime, events)
    assert body["object"] == "text_completion"
    assert body["usage"]["prompt_tokens"] == len(ids)
    assert body["usage"]["completion_tokens"] == len(events)


def test_the_default_is_sixteen_tokens(talker: Talker, runtime: Runtime) -> None:
    body = talker.text(PROMPT, logit_bias=letter_bias(runtime))
    assert len(text_of(body)) == body["usage"]["completion_tokens"] == 16
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["choices"][0]["logprobs"] is None


def test_an_end_token_has_no_text_but_is_told(talker: Talker) -> None:
    body = talker.text(PROMPT, logit_bias={"0": 100}, temperature=0, logprobs=1)
    assert text_of(body) == ""
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["choices"][0]["logprobs"]["tokens"] == ["<|end|>"]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("most", [0, 3])
def test_a_prompt_is_scored_as_the_model_thinks(
    talker: Talker, runtime: Runtime, as_ids: bool, most: int
) -> None:
    ids = runtime.tokenizer.encode(PROMPT * 5, bos=True)
    assert len(ids) > runtime.config.cache.capacity + runtime.config.prefill_block
    prompt = ids if as_ids else PROMPT * 5
    body = talker.text(prompt, max_tokens=most, echo=True, logprobs=2, logit_bias=letter_bias(runtime))
    told = body["choices"][0]["logprobs"]
    logprobs = runtime.score(ids).double().log_softmax(-1)
    expected = [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]
    assert told["token_logprobs"][0] is told["top_logprobs"][0] is None
    assert told["token_logprobs"][1 : len(ids)] == pytest.approx(expected, abs=1e-6)
    assert len(told["tokens"]) == len(ids) + most
    for at, top in enumerate(told["top_logprobs"][1 : len(ids)]):
        assert max(top.values()) == pytest.approx(float(logprobs[at].max()), abs=1e-6)
        assert top[told["tokens"][at + 1]] == told["token_logprobs"][at + 1]
        assert len(top) in (2, 3)
    assert text_of(body).startswith(PROMPT * 5)
    assert len(text_of(body)) == len(PROMPT * 5) + most
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == most


def test_offsets_say_where_tokens_are_in_the_text(talker: Talker, runtime: Runtime) -> None:
    body = talker.text("hello world", max_tokens=2, echo=True, logprobs=0, logit_bias=letter_bias(runtime))
    told = body["choices"][0]["logprobs"]
    lengths = [len(token) for token in told["tokens"]]
    assert told["text_offset"] == [0, *accumulate(lengths)][:-1]
    assert "".join(told["tokens"]) == text_of(body)


def test_tokens_of_part_of_a_character_have_names_of_their_own(talker: Talker, runtime: Runtime) -> None:
    ids = runtime.tokenizer.encode("é")
    assert len(ids) == 2
    body = talker.text(ids, max_tokens=0, echo=True, logprobs=0)
    assert body["choices"][0]["logprobs"]["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert body["choices"][0]["logprobs"]["text_offset"] == [0, 0]
    assert text_of(body) == "é"


def test_a_text_goes_on_in_the_middle_of_a_character(talker: Talker, runtime: Runtime) -> None:
    lead, trail = runtime.tokenizer.encode("é")
    body = talker.text([lead], max_tokens=1, logit_bias={str(trail): 100})
    assert text_of(body) == "é"


def test_an_echo_without_logprobs_computes_nothing(talker: Talker) -> None:
    body = talker.text(PROMPT, max_tokens=0, echo=True)
    assert (text_of(body), body["choices"][0]["logprobs"]) == (PROMPT, None)


def test_many_prompts_and_choices_are_numbered(talker: Talker, runtime: Runtime) -> None:
    settings = {"max_tokens": 10, "seed": 4, "logit_bias": letter_bias(runtime), "temperature": 2}
    prompts = ["one", "two", "three", "four", "five"]
    body = talker.text(prompts, n=2, **settings, best_of=2)
    assert [choice["index"] for choice in body["choices"]] == list(range(10))
    for number, prompt in enumerate(prompts):
        assert text_of(talker.text(prompt, **settings)) == text_of(body, 2 * number)
        assert text_of(body, 2 * number) != text_of(body, 2 * number + 1)
    assert body["usage"]["completion_tokens"] == 100
    assert body["usage"]["prompt_tokens"] == sum(len(runtime.tokenizer.encode(each)) for each in prompts)
    ids = [runtime.tokenizer.encode(prompt) for prompt in prompts]
    assert [text_of(talker.text(ids, n=2, **settings), at) for at in range(10)] == [
        text_of(body, at) for at in range(10)
    ]


@on_a_loop
async def test_a_fork_that_waits_gives_way_to_another_prompt(
    sessions: TextSessions, small_runtime: Runtime
) -> None:
    """With as many slabs as choices run at once, each of these has one, in whatever order they come."""
    slabs, opening = small_runtime.describe().capacity, asyncio.Lock()
    beside: list[PromptSessions] = []
    for text in ("one", "two"):
        prompt = Prompt(text, small_runtime.tokenizer)
        beside.append(PromptSessions(prompt, slabs, slabs, "me", sessions, beside, opening))
    one, two = beside
    taken = [await one.take()]
    assert small_runtime.free_slabs == 0  # the others wait for choices of the first prompt
    taken += [await two.take(), await one.take()]
    with pytest.raises(ResourceExhausted):
        await two.take()
    assert [await each.release() for each in beside] == [0, 0]
    assert len({session.session_id for session in taken}) == slabs
    for session in taken:
        await sessions.close(session)
    assert small_runtime.free_slabs == slabs


def test_choices_of_one_prompt_compute_it_once(
    talker: Talker, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the first lap, too, where prefixes are not shared."""
    rows: list[int] = []
    launch = runtime.backend.launch

    def count(segments: Sequence[Segment], *rest: Any) -> LaunchedStep:
        rows.append(sum(segment.rows for segment in segments))
        return launch(segments, *rest)

    monkeypatch.setattr(runtime.backend, "launch", count)
    ids = runtime.tokenizer.encode("one two three " * runtime.config.cache.capacity)
    settings = {"max_tokens": 4, "seed": 4, "logit_bias": letter_bias(runtime), "temperature": 2}
    body = talker.text(ids, n=3, **settings)
    # Each choice computes the last token of the prompt and three of its answer.
    assert sum(rows) == len(ids) - 1 + 3 * (1 + 3)
    assert text_of(body) == text_of(talker.text(ids, **settings))


def test_streamed_and_whole_are_the_same(talker: Talker, runtime: Runtime) -> None:
    settings = {"max_tokens": 20, "seed": 6, "echo": True, "logprobs": 2, "n": 2}
    body = talker.text(["hello", "world"], **settings)
    chunks = talker.stream(
        TEXT, prompt=["hello", "world"], **settings, stream_options={"include_usage": True}
    )
    *said, last = chunks
    assert (last["choices"], counted(last)) == ([], counted(body))
    for choice in body["choices"]:
        own = [part for chunk in said for part in chunk["choices"] if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own if part["finish_reason"]] == [choice["finish_reason"]]
        for name, values in choice["logprobs"].items():
            assert [each for part in own for each in part["logprobs"][name]] == values
    assert all("usage" not in chunk for chunk in talker.stream(TEXT, prompt="x", max_tokens=2))


def test_stop_strings_never_show(talker: Talker, runtime: Runtime) -> None:
    settings = {"max_tokens": 20, "seed": 2, "logit_bias": letter_bias(runtime)}
    whole = text_of(talker.text(PROMPT, **settings))
    body = talker.text(PROMPT, **settings, stop=whole[5:7])
    assert text_of(body) == whole[: whole.index(whole[5:7])]
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt"),
        ({"prompt": ["x", 1]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], ["x"]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [99999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["x"] * 65, "n": 2}, "prompt"),
        ({"prompt": [5] * 40000, "echo": True, "logprobs": 1}, "prompt"),
        ({"stream_options": {}}, "stream_options"),
        ({"tools": []}, "tools"),
        ({"messages": []}, "messages"),
    ],
)
def test_fields_are_refused_by_name(talker: Talker, fields: dict[str, Any], param: str) -> None:
    status, error = talker.refusal(TEXT, **{"prompt": "x", **fields})
    assert (status, error["param"]) == (400, param), error


def test_a_text_that_is_no_unicode_is_refused(talker: Talker) -> None:
    answer = talker.client.post(
        TEXT,
        content=b'{"model": "%s", "prompt": "\\ud800"}' % talker.model.encode(),
        headers={"content-type": "application/json"},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_no_room_is_said_before_a_stream_begins(talker: Talker, runtime: Runtime) -> None:
    capacity = runtime.describe().capacity
    named = [runtime.create_session(owner="local") for _ in range(capacity)]
    for fields in ({}, {"echo": True, "logprobs": 1}):
        status, error = talker.refusal(TEXT, prompt="x", stream=True, **fields)
        assert (status, error["code"]) == (429, "rate_limit_exceeded")
    for session_id in named:
        runtime.close_session(session_id, owner="local")


def test_no_room_in_a_stream_is_its_last_event(talker: Talker, runtime: Runtime) -> None:
    named = [runtime.create_session(owner="local") for _ in range(runtime.describe().capacity - 1)]
    with talker.streaming(TEXT, prompt=["x", "y"], max_tokens=200, temperature=0) as events:
        told = list(events)
    for session_id in named:
        runtime.close_session(session_id, owner="local")
    assert '"rate_limit_exceeded"' in told[-1]


def test_what_the_tokenizer_puts_in_front_is_no_part_of_a_prompt() -> None:
    tokenizer = Tokenizer(sentencepiece_files())

    async def told() -> tuple[list[int], Piece]:
        prompt = Prompt("hello world", tokenizer)
        return prompt.token_ids, prompt.piece_of([TokenEvent(token_id) for token_id in prompt.token_ids])

    ids, piece = asyncio.run(told())
    assert ids[0] == tokenizer.bos_id
    assert piece.text == "hello world"
    texts = [token.text for token in piece.tokens]
    assert "".join(texts) == "<s> hello world"
    assert piece.tokens[0].offset == piece.tokens[1].offset == 0
    assert all(piece.text[token.offset :].startswith(token.text) for token in piece.tokens[3:])
    assert piece.tokens[-1].offset == len("hello world") - len(texts[-1])

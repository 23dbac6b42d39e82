"""Contestants over HTTP: against a real server, and against ones that misbehave."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kakeya.bench.contestants import ChatContestant, Contestant, ResponsesContestant, Stopwatch
from kakeya.bench.contestants_http import Refused, events, fetched
from kakeya.bench.server_process import ServerProcess
from kakeya.client import AsyncClient
from kakeya.errors import RemoteError
from support.leftovers import close_sessions
from support.scripted_http import scripted_http, sse

Make = Callable[[str, str, str, int], Contestant]


@pytest.fixture(autouse=True)
def leave_nothing(tiny_server: ServerProcess) -> Iterator[None]:
    yield
    close_sessions(tiny_server.address)


def model_of(server: ServerProcess) -> str:
    async def asked() -> str:
        async with AsyncClient(server.address) as client:
            return (await client.server_info()).model_id

    return asyncio.run(asked())


@pytest.mark.parametrize("make", [ResponsesContestant, ChatContestant])
def test_a_conversation_goes_on_from_where_it_was(make: Make, tiny_server: ServerProcess) -> None:
    assert tiny_server.http_address is not None
    contestant = make("any", tiny_server.http_address, model_of(tiny_server), 4)
    first, second = contestant.say("hello there"), contestant.say("and again")
    assert first.cached_tokens == 0
    assert 0 < first.answer_tokens <= 4
    assert second.prompt_tokens > first.history_tokens
    assert second.cached_tokens in (first.history_tokens, first.history_tokens - 1)
    assert 0 < (second.ttft_s or 0) <= second.latency_s
    contestant.forget()
    assert contestant.say("hello there").prompt_tokens == first.prompt_tokens


def test_both_ways_hold_the_same_conversation(tiny_server: ServerProcess) -> None:
    assert tiny_server.http_address is not None
    model = model_of(tiny_server)
    ways = [make("any", tiny_server.http_address, model, 3) for make in (ResponsesContestant, ChatContestant)]
    for text in ("one of these", "two of these"):
        responses, chat = (way.say(text) for way in ways)
        assert (responses.prompt_tokens, responses.answer_tokens) == (chat.prompt_tokens, chat.answer_tokens)


USAGE = {"prompt_tokens": 9, "completion_tokens": 2}


def piece(text: str | None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}], **more}


def test_chat_resends_everything_and_keeps_only_what_went_well() -> None:
    asked: list[list[str]] = []
    broken = False

    def script(path: str, body: Any) -> tuple[int, str]:
        asked.append([message["content"] for message in body["messages"]])
        usage = [] if broken else [{"choices": [], "usage": USAGE}]
        return 200, sse([piece(None), piece("a"), piece("b"), *usage])

    with scripted_http(script) as address:
        contestant = ChatContestant("any", address, "m", 2)
        answer = contestant.say("one")
        broken = True
        with pytest.raises(RemoteError, match="ended without its usage"):
            contestant.say("two")
        broken = False
        contestant.say("three")
    assert asked == [["one"], ["one", "ab", "two"], ["one", "ab", "three"]]
    assert (answer.prompt_tokens, answer.answer_tokens, answer.cached_tokens) == (9, 2, None)


def test_responses_name_the_one_before() -> None:
    asked: list[str | None] = []

    def script(path: str, body: Any) -> tuple[int, str]:
        asked.append(body.get("previous_response_id"))
        assert path == "/v1/responses"
        usage = {"input_tokens": 5, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 3}}
        response = {"id": f"r{len(asked)}", "usage": usage}
        delta = {"type": "response.output_text.delta", "delta": "x"}
        return 200, sse([delta, delta, {"type": "response.incomplete", "response": response}])

    with scripted_http(script) as address:
        contestant = ResponsesContestant("any", address, "m", 1)
        answer = contestant.say("one")
        contestant.say("two")
        contestant.forget()
        contestant.say("three")
    assert asked == [None, "r1", None]
    assert answer.computed_tokens == 2


@pytest.mark.parametrize(
    ("make", "sent", "message"),
    [
        (ChatContestant, [piece("a"), {"error": {"message": "too much"}}], "completion failed: too much"),
        (ChatContestant, [], "without its usage"),
        (ResponsesContestant, [{"type": "response.created"}], "without its usage"),
        (ResponsesContestant, [{"type": "response.failed", "response": {"error": "no"}}], "failed: no"),
        (ResponsesContestant, [{"type": "error", "message": "never"}], "failed: never"),
        (ResponsesContestant, [{"error": {"message": "off"}}], "failed: {'message': 'off'}"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(make: Make, sent: list[Any], message: str) -> None:
    with (
        scripted_http(lambda path, body: (200, sse(sent))) as address,
        pytest.raises(RemoteError, match=message) as caught,
    ):
        make("any", address, "m", 1).say("hello")
    assert not isinstance(caught.value, Refused)


@pytest.mark.parametrize(
    ("status", "text", "message", "refused"),
    [
        (400, json.dumps({"error": {"message": "too long"}}), "answered 400: too long", True),
        (404, "no such page", "answered 404: no such page", True),
        (429, "later", "answered 429: later", False),
        (500, json.dumps({"error": "odd"}), 'answered 500: {"error": "odd"}', False),
    ],
)
def test_only_what_can_never_be_answered_is_refused(
    status: int, text: str, message: str, refused: bool
) -> None:
    with scripted_http(lambda path, body: (status, text)) as address:
        with pytest.raises(RemoteError, match=message) as caught:
            list(events(address, "/any", {}))
        with pytest.raises(RemoteError, match=message):
            fetched(address, "/any")
    assert isinstance(caught.value, Refused) is refused


def test_what_is_no_json_is_an_error() -> None:
    with scripted_http(lambda path, body: (200, "data: {broken\n\n")) as address:
        with pytest.raises(RemoteError, match="POST /any broke off"):
            list(events(address, "/any", {}))
        with pytest.raises(RemoteError, match="GET /any broke off"):
            fetched(address, "/any")


def test_only_the_first_piece_is_the_first() -> None:
    watch = Stopwatch()
    assert watch.first_s is None
    watch.first()
    first = watch.first_s
    watch.first()
    assert watch.first_s == first
    assert first is not None
    assert first < watch.now_s


def test_no_server_is_an_error() -> None:
    with pytest.raises(RemoteError, match="broke off: ConnectionRefusedError"):
        list(events("127.0.0.1:1", "/any", {}))
    with pytest.raises(RemoteError, match="broke off: ConnectionRefusedError"):
        fetched("127.0.0.1:1", "/any")

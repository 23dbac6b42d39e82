"""Ways to talk over HTTP: against a real server, and against ones that misbehave."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from kakeya.bench.processes import ServerProcess
from kakeya.bench.talk import Turn
from kakeya.bench.ways import ChatWay, HttpWay, Refused, ResponsesWay, Stopwatch
from kakeya.client import AsyncClient
from kakeya.errors import RemoteError
from support.leftovers import close_sessions
from support.scripted_http import scripted_http, sse

Make = Callable[..., Any]


@pytest.fixture(autouse=True)
def leave_nothing(tiny_server: ServerProcess) -> Iterator[None]:
    yield
    close_sessions(tiny_server.address)


class Talking:
    """A way whose calls are made one at a time, each on a client of its own."""

    def __init__(self, make: Make, address: str, max_tokens: int, model: str = "m") -> None:
        self._way = make("any", None, address, model, max_tokens)

    def say(self, text: str) -> Turn:
        return self._done(lambda: self._way.say(text))

    def forget(self) -> None:
        self._done(self._way.forget)

    def events(self) -> list[Any]:
        async def heard() -> list[Any]:
            return [event async for event in self._way.post("/any", {})]

        return self._done(heard)

    def _done(self, call: Callable[[], Any]) -> Any:
        async def story() -> Any:
            async with httpx.AsyncClient(trust_env=False) as self._way.client:
                return await call()

        return asyncio.run(story())


def model_of(server: ServerProcess) -> str:
    async def asked() -> str:
        async with AsyncClient(server.address) as client:
            return (await client.server_info()).model_id

    return asyncio.run(asked())


@pytest.mark.parametrize("make", [ResponsesWay, ChatWay])
def test_a_conversation_goes_on_from_where_it_was(make: Make, tiny_server: ServerProcess) -> None:
    way = Talking(make, str(tiny_server.http_address), 4, model_of(tiny_server))
    first, second = way.say("hello there"), way.say("and again")
    assert first.cached_tokens == 0
    assert 0 < (first.answer_tokens or 0) <= 4
    assert first.history_tokens is not None
    assert (second.prompt_tokens or 0) > first.history_tokens
    assert second.cached_tokens in (first.history_tokens, first.history_tokens - 1)
    assert 0 < (second.ttft_s or 0) <= (second.latency_s or 0)
    way.forget()
    assert way.say("hello there").prompt_tokens == first.prompt_tokens


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
        way = Talking(ChatWay, address, 2)
        answer = way.say("one")
        broken = True
        with pytest.raises(RemoteError, match="ended without its usage"):
            way.say("two")
        broken = False
        way.say("three")
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
        way = Talking(ResponsesWay, address, 1)
        answer = way.say("one")
        way.say("two")
        way.forget()
        way.say("three")
    assert asked == [None, "r1", None]
    assert answer.computed_tokens == 2


@pytest.mark.parametrize(
    ("make", "sent", "message"),
    [
        (ChatWay, [piece("a"), {"error": {"message": "too much"}}], "completion failed: too much"),
        (ChatWay, [], "without its usage"),
        (ResponsesWay, [{"type": "response.created"}], "without its usage"),
        (ResponsesWay, [{"type": "response.failed", "response": {"error": "no"}}], "failed: no"),
        (ResponsesWay, [{"type": "error", "message": "never"}], "failed: never"),
        (ResponsesWay, [{"error": {"message": "off"}}], "failed: {'message': 'off'}"),
    ],
)
def test_a_stream_that_is_not_whole_is_an_error(make: Make, sent: list[Any], message: str) -> None:
    with (
        scripted_http(lambda path, body: (200, sse(sent))) as address,
        pytest.raises(RemoteError, match=message) as caught,
    ):
        Talking(make, address, 1).say("hello")
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
    with (
        scripted_http(lambda path, body: (status, text)) as address,
        pytest.raises(RemoteError, match=message) as caught,
    ):
        Talking(HttpWay, address, 1).events()
    assert isinstance(caught.value, Refused) is refused


def test_what_is_no_json_is_an_error() -> None:
    with (
        scripted_http(lambda path, body: (200, "data: {broken\n\n")) as address,
        pytest.raises(RemoteError, match="POST /any broke off"),
    ):
        Talking(HttpWay, address, 1).events()


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
    with pytest.raises(RemoteError, match="POST /any broke off: ConnectError"):
        Talking(HttpWay, "127.0.0.1:1", 1).events()

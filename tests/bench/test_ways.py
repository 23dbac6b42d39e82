"""Ways to talk: with a real server, and with ones that misbehave."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kakeya.bench.processes import ServerProcess, running_server
from kakeya.bench.talk import Turn
from kakeya.bench.text import Messages
from kakeya.bench.ways import ChatWay, GrpcWay, Refused, ResponsesWay
from kakeya.client import AsyncClient
from kakeya.errors import InvalidArgument, RemoteError, SessionNotFound
from support.fakes import scripted_http, sse
from support.serving import close_sessions

Make = Callable[..., Any]
USAGE = {"prompt_tokens": 9, "completion_tokens": 2}


class Talking:
    """A way whose calls are made one at a time, each on a client of its own."""

    def __init__(self, make: Make, address: str, max_tokens: int = 1, model: str = "m") -> None:
        self._way = make("any", None, address, model, max_tokens)

    def say(self, text: str = "hello") -> Turn:
        async def story() -> Any:
            async with httpx.AsyncClient(trust_env=False) as self._way.client:
                return await self._way.say(text)

        return asyncio.run(story())

    def forget(self) -> None:
        asyncio.run(self._way.forget())


@pytest.mark.parametrize("make", [ResponsesWay, ChatWay])
def test_a_conversation_goes_on_from_where_it_was(make: Make, tiny_server: ServerProcess) -> None:
    async def model() -> str:
        async with running_server(tiny_server.address) as server:
            return server.info.model_id

    way = Talking(make, tiny_server.http_address, 4, asyncio.run(model()))
    first, second = way.say("hello there"), way.say("and again")
    assert first.cached_tokens == 0
    assert 0 < (first.answer_tokens or 0) <= 4
    assert first.history_tokens is not None
    assert (second.prompt_tokens or 0) > first.history_tokens
    assert second.cached_tokens in (first.history_tokens, first.history_tokens - 1)
    assert 0 < (second.ttft_s or 0) < (second.latency_s or 0)
    way.forget()
    assert way.say("hello there").prompt_tokens == first.prompt_tokens
    close_sessions(tiny_server.address)


def test_a_session_goes_on_after_an_error_and_is_replaced_when_it_is_lost(
    tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def close_all(client: AsyncClient) -> None:
        for each in await client.list_sessions():
            await client.session(each.session_id).close()

    async def story() -> list[tuple[int | None, int]]:
        async with running_server(tiny_server.address) as server:
            messages = Messages((await server.client.tokenizer).encode, 5, 0)
            way = GrpcWay(server.client, messages, 3)
            seen = [((await way.say("one")).history_tokens, way.sessions_opened)]
            with monkeypatch.context() as bad, pytest.raises(InvalidArgument):
                bad.setattr(messages, "encoded", lambda text: [10**6])
                await way.say("two")
            seen.append(((await way.say("three")).history_tokens, way.sessions_opened))
            await close_all(server.client)
            with pytest.raises(SessionNotFound):
                await way.say("four")
            seen.append(((await way.say("five")).history_tokens, way.sessions_opened))
            await close_all(server.client)
            await way.forget()  # nobody needs it any more
            return seen

    assert asyncio.run(story()) == [(8, 1), (16, 1), (8, 2)]


def piece(text: str | None) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


def test_chat_resends_everything_and_keeps_only_what_went_well() -> None:
    asked: list[list[str]] = []

    def script(path: str, body: Any) -> tuple[int, str]:
        asked.append([message["content"] for message in body["messages"]])
        usage = [] if asked[-1][-1] == "two" else [{"choices": [], "usage": USAGE}]
        return 200, sse([piece(None), piece("a"), piece("b"), *usage])

    with scripted_http(script) as address:
        way = Talking(ChatWay, address)
        answer = way.say("one")
        with pytest.raises(RemoteError, match="ended without its usage"):
            way.say("two")
        way.say("three")
    assert asked == [["one"], ["one", "ab", "two"], ["one", "ab", "three"]]
    assert (answer.prompt_tokens, answer.answer_tokens, answer.cached_tokens) == (9, 2, None)


def test_responses_name_the_one_before() -> None:
    asked: list[str | None] = []

    def script(path: str, body: Any) -> tuple[int, str]:
        asked.append(body.get("previous_response_id"))
        usage = {"input_tokens": 5, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 3}}
        response = {"id": f"r{len(asked)}", "usage": usage}
        delta = {"type": "response.output_text.delta", "delta": "x"}
        return 200, sse([delta, delta, {"type": "response.incomplete", "response": response}])

    with scripted_http(script) as address:
        way = Talking(ResponsesWay, address)
        assert way.say("one").computed_tokens == 2
        way.say("two")
        way.forget()
        way.say("three")
    assert asked == [None, "r1", None]


@pytest.mark.parametrize(
    ("make", "status", "sent", "message", "refused"),
    [
        (ChatWay, 200, [piece("a"), {"error": {"message": "too much"}}], "failed: too much", False),
        (ChatWay, 200, [], "without its usage", False),
        (ResponsesWay, 200, [{"type": "response.created"}], "without its usage", False),
        (ResponsesWay, 200, [{"type": "response.failed", "response": {"error": "no"}}], "failed: no", False),
        (ResponsesWay, 200, [{"type": "error", "message": "never"}], "failed: never", False),
        (ResponsesWay, 200, [{"error": {"message": "off"}}], "failed: {'message': 'off'}", False),
        (ChatWay, 200, "data: {broken\n\n", "POST /v1/chat/completions broke off", False),
        (ChatWay, 400, json.dumps({"error": {"message": "too long"}}), "answered 400: too long", True),
        (ChatWay, 404, "no such page", "answered 404: no such page", True),
        (ChatWay, 429, "later", "answered 429: later", False),
        (ResponsesWay, 500, json.dumps({"error": "odd"}), 'answered 500: {"error": "odd"}', False),
    ],
)
def test_what_is_no_whole_answer_is_an_error_and_only_what_can_never_be_answered_is_refused(
    make: Make, status: int, sent: Any, message: str, refused: bool
) -> None:
    text = sent if isinstance(sent, str) else sse(sent)
    with (
        scripted_http(lambda path, body: (status, text)) as address,
        pytest.raises(RemoteError, match=message) as caught,
    ):
        Talking(make, address).say()
    assert isinstance(caught.value, Refused) is refused


def test_no_server_is_an_error() -> None:
    with pytest.raises(RemoteError, match="POST /v1/responses broke off: ConnectError"):
        Talking(ResponsesWay, "127.0.0.1:1").say()

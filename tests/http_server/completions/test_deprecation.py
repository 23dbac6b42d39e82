"""The chat route says that it will end, on every answer; no other route does."""

from dataclasses import replace
from datetime import date

from kakeya.serving.keys import hash_key
from support.http_serving import ANY_PORT, client_of, start
from support.serving import on_loop

CHAT = "/v1/chat/completions"
NAMES = ("deprecation", "sunset", "link")


def headers_of(settings: dict[str, object]) -> list[tuple[int, tuple[str | None, ...]]]:
    """What a server without a model answers: an error of each layer, and one of another route."""
    server = start(replace(ANY_PORT, max_body_bytes=1024, **settings))
    try:
        with client_of(server, "right" if "key_hashes" in settings else "") as client:
            answers = [
                client.post(CHAT, json={"model": "m", "messages": [{"role": "user", "content": "hello"}]}),
                client.post(CHAT, content=b"{", headers={"content-type": "application/json"}),
                client.post(CHAT, json={}),
                client.get(CHAT),
                client.post(CHAT, content=b"x" * 2000),
                client.post(CHAT, headers={"authorization": "Bearer wrong"}),
                client.get("/v1/models"),
            ]
    finally:
        on_loop(server.drain(0))
    return [(answer.status_code, tuple(answer.headers.get(name) for name in NAMES)) for answer in answers]


def test_every_answer_of_the_route_says_it_and_no_other_does() -> None:
    answered = headers_of({"key_hashes": (hash_key("right"),), "chat_sunset": date(2031, 2, 3)})
    said = ("true", "Mon, 03 Feb 2031 00:00:00 GMT", '</v1/responses>; rel="successor-version"')
    assert [status for status, _ in answered] == [503, 400, 400, 405, 413, 401, 503]
    assert [headers for _, headers in answered] == [said] * 6 + [(None,) * 3]


def test_it_can_be_turned_off() -> None:
    answered = headers_of({"chat_deprecation": False})
    assert {headers for _, headers in answered} == {(None,) * 3}

"""What left a conversation's window is seen again, and usage says so."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from support.http_clients import ENGINE, Responding, responding

LONG = "hello world. " * 12 + "quick brown fox. " + "hello world. " * 120


@pytest.fixture(scope="module")
def recalling(model: Path) -> Iterator[Responding]:
    engine = replace(ENGINE, cache=replace(ENGINE.cache, window=60, recall=80))
    with responding(model, engine) as api:
        yield api


def test_a_response_says_what_was_recalled(recalling: Responding) -> None:
    first = recalling.ask(LONG)
    second = recalling.ask("quick brown fox", previous_response_id=first["id"])
    usage = second["usage"]
    assert 0 < usage["recalled_tokens"] <= 80
    assert usage["recalled_tokens"] == sum(each["end"] - each["start"] for each in usage["recalled"])
    assert "quick brown fox" in "".join(each["text"] for each in usage["recalled"])


def test_a_chat_says_how_much_was_recalled(recalling: Responding) -> None:
    name = recalling.http.get("/v1/models").json()["data"][0]["id"]
    messages = [{"role": "user", "content": LONG}]
    for _ in range(2):
        body = {"model": name, "messages": messages, "max_tokens": 8, "temperature": 0}
        answer = recalling.http.post("/v1/chat/completions", json=body).json()
        said = answer["choices"][0]["message"]
        messages = [*messages, said, {"role": "user", "content": "quick brown fox"}]
    assert 0 < answer["usage"]["recalled_tokens"] <= 80
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_a_message_says_how_much_was_recalled(recalling: Responding) -> None:
    """Through Anthropic's API."""
    name = recalling.http.get("/v1/models").json()["data"][0]["id"]
    messages: list[dict[str, Any]] = [{"role": "user", "content": LONG}]
    for _ in range(2):
        body = {"model": name, "messages": messages, "max_tokens": 8, "temperature": 0}
        answer = recalling.http.post("/v1/messages", json=body).json()
        said = {"role": "assistant", "content": answer["content"]}
        messages = [*messages, said, {"role": "user", "content": "quick brown fox"}]
    assert 0 < answer["usage"]["recalled_tokens"] <= 80
    assert answer["usage"]["dropped_tokens"] > 0


def test_the_console_counts_what_is_recalled(recalling: Responding) -> None:
    first = recalling.ask(LONG)
    recalling.ask("quick brown fox", previous_response_id=first["id"])
    sessions = recalling.http.get("/console/sessions").json()["sessions"]
    assert any(0 < session["recalled_tokens"] <= 80 for session in sessions)

"""Agents with one system message compute it once, over HTTP too, and say what they would have said alone."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.config import CacheConfig
from kakeya.types import ShareBeginnings
from support import serving
from support.http_clients import Talker, content_of, user
from support.http_serving import ANY_PORT, client_of, serving_http

SYSTEM = {"role": "system", "content": "You are one of many agents, and all of you have been told the same."}
ENGINE = replace(serving.ENGINE, cache=CacheConfig(sink=2, window=398, spare=8), capacity=8)
STATELESS = replace(ANY_PORT, chat_matching=False)


@pytest.fixture(scope="module")
def talkers(model: Path) -> Iterator[tuple[Talker, Talker]]:
    """To a server that shares, and to one that does not."""
    with ExitStack() as stack:
        made = []
        for share in (ShareBeginnings.OWNER, ShareBeginnings.OFF):
            engine = replace(ENGINE, share_beginnings=share)
            server, runtime = stack.enter_context(serving_http(model, STATELESS, engine))
            made.append(Talker(stack.enter_context(client_of(server)), runtime.describe().model))
        yield made[0], made[1]


def cached(body: dict[str, dict[str, dict[str, int]]]) -> int:
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_later_agents_copy_the_system_message(talkers: tuple[Talker, Talker]) -> None:
    sharing, alone = talkers
    for index, question in enumerate(["What is this?", "Who are you?", "Where are we?"]):
        messages = [SYSTEM, user(question)]
        said, expected = (each.chat(messages, max_tokens=5, temperature=0) for each in (sharing, alone))
        assert content_of(said) == content_of(expected)
        assert cached(expected) == 0
        # All of it but what is less than a granule.
        assert cached(said) >= (len(SYSTEM["content"]) - 32 if index else 0)


def test_a_stream_of_messages_begins_with_what_was_copied(talkers: tuple[Talker, Talker]) -> None:
    sharing, _ = talkers
    for question in ("How are you?", "Why is that?"):
        fields = {"system": SYSTEM["content"], "messages": [user(question)], "max_tokens": 5}
        with sharing.streaming("/v1/messages", **fields) as lines:
            events = [json.loads(line) for line in lines if line.startswith("{")]
        begun = events[0]["message"]["usage"]
        [ended] = [event["usage"] for event in events if event["type"] == "message_delta"]
        assert begun == ended | {"output_tokens": 0}
    # All of it but what is less than a granule.
    assert begun["cache_read_input_tokens"] >= len(SYSTEM["content"]) - 32


def test_several_choices_compute_their_prompt_once(talkers: tuple[Talker, Talker]) -> None:
    sharing, alone = talkers
    fields = {
        "messages": [SYSTEM, user("Say something.")],
        "n": 4,
        "seed": 3,
        "temperature": 1.5,
        "max_tokens": 6,
    }
    before = computed(sharing)
    said, expected = sharing.chat(**fields), alone.chat(**fields)
    assert [content_of(said, index) for index in range(4)] == [content_of(expected, i) for i in range(4)]
    prompt = said["usage"]["prompt_tokens"]
    assert computed(sharing) - before < prompt + 4 * 16


def computed(talker: Talker) -> float:
    lines = talker.client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("kakeya_prompt_tokens_total")).split()[1])

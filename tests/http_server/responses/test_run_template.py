"""What the template is told besides is part of what a chain of responses stands on."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kakeya.config import RuntimeConfig, StateConfig
from support.http_clients import Responding, cached, history, responding, text_of
from support.tiny import write_chat_model

WORDS = "no thoughts"
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def thinking_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its template begins otherwise where `enable_thinking` is false."""
    directory = write_chat_model(tmp_path_factory.mktemp("thinking"))
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    begin = "{% if enable_thinking is false %}" + WORDS + "{% endif %}"
    settings["chat_template"] = begin + settings["chat_template"]
    path.write_text(json.dumps(settings))
    return directory


@pytest.fixture(scope="module")
def api(thinking_model: Path) -> Iterator[Responding]:
    with responding(thinking_model) as api:
        yield api


def words(api: Responding) -> int:
    return len(api.runtime.tokenizer.encode(WORDS))


def test_a_template_is_told_what_it_asks_for(api: Responding) -> None:
    plain, quiet = api.ask("Hello"), api.ask("Hello", **QUIET)
    assert quiet["usage"]["input_tokens"] == plain["usage"]["input_tokens"] + words(api)
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6}
    model = api.runtime.describe().model
    answer = api.http.post("/v1/chat/completions", json={"model": model, **chat, **QUIET, "temperature": 0})
    assert answer.json()["choices"][0]["message"]["content"] == text_of(quiet)


def test_a_chain_keeps_what_its_template_was_told(api: Responding) -> None:
    first = api.ask("Hello", **QUIET)
    second = api.ask("On", previous_response_id=first["id"])
    assert cached(second) == history(first) - 1
    same = api.ask("On", previous_response_id=first["id"], **QUIET)
    assert same["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    assert text_of(same) == text_of(second)


def test_what_a_template_is_told_otherwise_rebuilds_the_session(api: Responding) -> None:
    first = api.ask("Hello", **QUIET)
    loud = api.ask("On", previous_response_id=first["id"], chat_template_kwargs={})
    assert cached(loud) == 0
    said = [{"role": "user", "content": "Hello"}, *first["output"], {"role": "user", "content": "On"}]
    assert loud["usage"]["input_tokens"] == api.ask(said)["usage"]["input_tokens"]
    # And from there on it is left as it is.
    assert cached(api.ask("On", previous_response_id=loud["id"])) == history(loud) - 1


def test_a_conversation_keeps_it_too(api: Responding) -> None:
    conversation = api.http.post("/v1/conversations", json={}).json()["id"]
    first = api.ask("Hello", conversation=conversation, **QUIET)
    assert cached(api.ask("On", conversation=conversation)) == history(first) - 1
    assert cached(api.ask("On", conversation=conversation, chat_template_kwargs={})) == 0
    api.http.delete(f"/v1/conversations/{conversation}")


def test_what_does_not_fit_is_counted_with_it(api: Responding) -> None:
    def length(**fields: Any) -> int:
        asked = {"input": "Hello", "truncation": "disabled", "max_output_tokens": 10**6}
        found = re.search(r"has (\d+) tokens", api.refused(400, **asked, **fields)["message"])
        assert found is not None
        return int(found[1])

    assert length(**QUIET) == length() + words(api)
    first = api.ask("Hello", **QUIET)
    again = api.ask("Hello", previous_response_id=first["id"])
    assert length(previous_response_id=first["id"]) == again["usage"]["input_tokens"]


def test_it_outlives_the_server(thinking_model: Path, tmp_path: Path) -> None:
    state = RuntimeConfig(state=StateConfig(tmp_path))
    with responding(thinking_model, sessions=state) as api:
        first = api.ask("Hello", **QUIET)
        api.ask("On", previous_response_id=first["id"])
        second = api.ask("On", previous_response_id=first["id"])
    with responding(thinking_model, sessions=state) as api:
        third = api.ask("And on", previous_response_id=second["id"])
        assert cached(third) > 0, "the session was found to fit"
        assert cached(api.ask("And on", previous_response_id=second["id"], chat_template_kwargs={})) == 0

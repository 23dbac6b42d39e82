"""/tokenize and /detokenize, in the words of vLLM and of llama.cpp."""

from typing import Any

import httpx
import pytest

from kakeya.runtime import Runtime
from support.http_clients import user


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_a_prompt_there_and_back(client: httpx.Client, runtime: Runtime) -> None:
    model = runtime.describe().model
    told = post(client, "/tokenize", model=model, prompt="Hello é", return_token_strs=True)
    assert told["tokens"] == runtime.tokenizer.encode("Hello é", bos=True)
    assert told["count"] == len(told["tokens"]) == len(told["token_strs"])
    assert told["max_model_len"] == runtime.config.cache.capacity
    bare = post(client, "/tokenize", prompt="Hello é", add_special_tokens=False)
    assert (bare["tokens"], bare["token_strs"]) == (runtime.tokenizer.encode("Hello é"), None)
    back = post(client, "/detokenize", model=model, tokens=bare["tokens"])
    assert back == {"prompt": "Hello é", "content": "Hello é"}


def test_a_content_in_pieces(client: httpx.Client, runtime: Runtime) -> None:
    told = post(client, "/tokenize", content="Hé", with_pieces=True)
    assert [piece["id"] for piece in told["tokens"]] == runtime.tokenizer.encode("Hé")
    spelled = b"".join(
        piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"])
        for piece in told["tokens"]
    )
    assert spelled == "Hé".encode()
    assert post(client, "/tokenize", content="")["tokens"] == []


def test_special_tokens_are_parsed_unless_they_must_not_be(client: httpx.Client) -> None:
    parsed = post(client, "/tokenize", content="<|end|>")
    plain = post(client, "/tokenize", content="<|end|>", parse_special=False)
    assert parsed["count"] == 1 < plain["count"]
    assert post(client, "/detokenize", tokens=parsed["tokens"])["content"] == "<|end|>"


def test_messages_are_what_a_chat_reads(client: httpx.Client, runtime: Runtime) -> None:
    messages = [user("Hello")]
    told = post(client, "/tokenize", messages=messages)
    assert told["tokens"] == runtime.tokenizer.chat_ids(messages)
    open_ended = post(client, "/tokenize", messages=messages, add_generation_prompt=False)
    assert told["tokens"][: open_ended["count"]] == open_ended["tokens"]
    assert open_ended["count"] < told["count"]
    begun = [*messages, {"role": "assistant", "content": "Well, "}]
    within = post(client, "/tokenize", messages=begun, continue_final_message=True)
    text = post(client, "/detokenize", tokens=within["tokens"])["prompt"]
    assert text == runtime.tokenizer.render_chat(messages) + "Well, "


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "content": "a"}, None),
        ("/tokenize", {"messages": [user("x")], "add_special_tokens": True}, None),
        ("/tokenize", {"prompt": "a", "unheard_of": 1}, "unheard_of"),
        ("/tokenize", {"prompt": "a", "model": "none"}, "model"),
        ("/detokenize", {"tokens": [0], "model": "none"}, "model"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
    ],
)
def test_what_cannot_be_is_named(
    client: httpx.Client, path: str, body: dict[str, Any], param: str | None
) -> None:
    answer = client.post(path, json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"] == param

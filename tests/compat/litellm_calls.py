"""What LiteLLM is asked to do, as a program of its own: it leaves event loops open behind it.

python litellm_calls.py URL MODEL KEY
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import litellm

from support.clients import WEATHER_QUESTION, WEATHER_TOOL, Served, all_places_taken

HELLO = [{"role": "user", "content": "Say hello."}]


def check_chat(server: dict[str, Any]) -> None:
    answer = litellm.completion(**server, messages=HELLO, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8


def check_stream(server: dict[str, Any]) -> None:
    whole = litellm.completion(**server, messages=HELLO, max_tokens=8)
    chunks = list(litellm.completion(**server, messages=HELLO, max_tokens=8, stream=True))
    assert len(chunks) > 2
    told = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert told == whole.choices[0].message.content


def check_tool(server: dict[str, Any]) -> None:
    wanted = {"tools": [WEATHER_TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    answer = litellm.completion(**server, **wanted, messages=WEATHER_QUESTION, max_tokens=80)
    (call,) = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["unit"] in ("C", "F")


def check_errors(server: dict[str, Any], served: Served) -> None:
    check_raises(
        litellm.BadRequestError, lambda: litellm.completion(**server | {"temperature": 3}, messages=HELLO)
    )
    check_raises(
        litellm.NotFoundError, lambda: litellm.completion(**server | {"model": "openai/none"}, messages=HELLO)
    )
    check_raises(
        litellm.AuthenticationError,
        lambda: litellm.completion(**server | {"api_key": "wrong"}, messages=HELLO),
    )
    with all_places_taken(served):
        check_raises(
            litellm.RateLimitError, lambda: litellm.completion(**server, messages=HELLO, max_tokens=1)
        )


def check_raises(kind: type[Exception], call: Callable[[], object]) -> None:
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


def main(url: str, model: str, key: str) -> None:
    server = {
        "model": f"openai/{model}",
        "api_base": url,
        "api_key": key,
        "temperature": 0,
        "max_retries": 0,
    }
    check_chat(server)
    check_stream(server)
    check_tool(server)
    check_errors(server, Served(url, model))


if __name__ == "__main__":
    main(*sys.argv[1:])

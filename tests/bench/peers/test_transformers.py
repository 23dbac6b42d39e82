"""transformers as a way to talk, in a process of its own."""

import asyncio
import io
import json
from pathlib import Path

import pytest
import torch
import transformers

from kakeya.bench.machine import installed_version
from kakeya.bench.peers import transformers as peer
from kakeya.bench.peers.transformers import TransformersWay, require_transformers
from kakeya.bench.processes import answer_lines
from kakeya.errors import ConfigError, PeerFailed

# Says how many messages it was sent, and breaks at the word "break".
WORKER = """
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if request["do"] == "open":
        reply = {"library": request["path"]}
    elif request["messages"][-1]["content"] == "break":
        reply = {"error": "RuntimeError: broken"}
    else:
        count = len(request["messages"])
        reply = {"text": "so", "prompt_tokens": count, "answer_tokens": request["max_tokens"]}
    print(json.dumps(reply), flush=True)
"""


def test_transformers_gets_the_whole_history_each_time() -> None:
    with TransformersWay("m", 2, 7, worker=("-c", WORKER)) as way:
        assert way.facts == {"library": "m"}
        first = asyncio.run(way.say("one"))
        with pytest.raises(PeerFailed, match="broken"):
            asyncio.run(way.say("break"))
        assert [asyncio.run(way.say(text)).prompt_tokens for text in ("two", "three")] == [3, 5]
        asyncio.run(way.forget())
        assert asyncio.run(way.say("again")).prompt_tokens == 1
        way.kill()
        with pytest.raises(PeerFailed, match="transformers ended unexpectedly"):
            asyncio.run(way.say("hello"))
    assert (first.ttft_s, first.cached_tokens, first.answer_tokens) == (None, 0, 7)
    assert (first.latency_s or 0) > 0


def test_transformers_itself_answers(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The peer sets what it likes, in a process of its own. This process keeps its settings.
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(transformers.utils.logging, "disable_progress_bar", lambda: None)
    messages = [{"role": "user", "content": "hello there"}]
    longer = [*messages, {"role": "assistant", "content": "so"}, {"role": "user", "content": "and"}]
    say = {"do": "say", "messages": messages, "max_tokens": 4}
    requests = [{"do": "open", "path": str(chat_model), "threads": 1}, say, say, {**say, "messages": longer}]
    replies = io.StringIO()
    answer_lines(peer._Worker().answer, io.StringIO("\n".join(map(json.dumps, requests))), replies)
    opened, first, again, second = (json.loads(line) for line in replies.getvalue().splitlines())
    assert opened == {"library": f"transformers {installed_version('transformers')}", "dtype": "bfloat16"}
    assert first == again
    assert 1 <= first["answer_tokens"] <= 4
    assert second["prompt_tokens"] > first["prompt_tokens"]


def test_a_model_that_transformers_cannot_open_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="Error"):
        TransformersWay(str(tmp_path), 1, 1)


def test_what_transformers_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_transformers(str(tmp_path))
    with pytest.raises(ConfigError, match="needs the model's file or directory"):
        require_transformers(str(tmp_path / "absent"))
    monkeypatch.setattr(peer, "find_spec", {"transformers": "found"}.get)
    require_transformers(str(tmp_path))
    with pytest.raises(ConfigError, match=r"accelerate is not installed: pip install 'kakeya\[peers\]'"):
        require_transformers(str(tmp_path / "model.gguf"))
    monkeypatch.setattr(peer, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"transformers is not installed: pip install 'kakeya\[peers\]'"):
        require_transformers(str(tmp_path))

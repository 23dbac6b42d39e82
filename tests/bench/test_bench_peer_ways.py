"""llama.cpp's server and transformers as ways to talk, each in a process of its own."""

import asyncio
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
import transformers

from kakeya.bench.machine import installed_version
from kakeya.bench.peers import llama_server, transformers as transformers_peer
from kakeya.bench.peers.llama_server import LlamaServer, fetched, require_llama_server
from kakeya.bench.peers.transformers import TransformersWay, require_transformers
from kakeya.bench.processes import answer_lines, resident_bytes
from kakeya.bench.talk import Turn
from kakeya.bench.ways import ChatWay
from kakeya.errors import ConfigError, PeerFailed, RemoteError
from support.scripted_http import scripted_http

# What both stand-ins for llama.cpp's server say: their settings as facts, and one word to everything else.
HANDLER = """
import json, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer

context = 0
ready_at = time.monotonic()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        settings = {"build_info": "b7", "default_generation_settings": {"n_ctx": context or 8192}}
        self.answer(200 if time.monotonic() >= ready_at else 503, json.dumps(settings))

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        usage = {"prompt_tokens": 5, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
        chunks = [{"choices": [{"delta": {"content": "word"}}]}, {"choices": [], "usage": usage}]
        self.answer(200, "".join("data: " + json.dumps(chunk) + "\\n\\n" for chunk in chunks))

    def answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass
"""
PACKAGE = (
    HANDLER
    + """
from types import SimpleNamespace as Space

def CommonParams():
    return Space(model=Space(path=""), cpuparams=Space(n_threads=-1), cpuparams_batch=Space(n_threads=-1))

def get_system_info():
    return "AVX2 = 1 | "

class Server:
    def __init__(self, params):
        global context
        if "broken" in params.model.path:
            raise RuntimeError("no such model")
        assert (params.n_parallel, params.n_gpu_layers) == (1, 0)
        assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 2
        context = params.n_ctx
        print("libraries print")
        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{server.server_port}"
"""
)
PROGRAM = (
    f"#!{sys.executable}\n"
    + HANDLER
    + """
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
if "broken" in given["-m"]:
    sys.exit("no such model")
assert (given["-t"], given["-tb"], given["-np"], given["-ngl"]) == ("2", "2", "1", "0")
context = int(given["-c"])
ready_at += 0.2
print("programs print")
HTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is installed, for child processes."""
    (tmp_path / "xllamacpp.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "llama-server"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return str(path)


def said_to(server: LlamaServer, text: str) -> Turn:
    async def story() -> Turn:
        async with httpx.AsyncClient(trust_env=False) as client:
            return await ChatWay("any", client, server.address, "any", 1).say(text)

    return asyncio.run(story())


@pytest.mark.parametrize(("status", "text"), [(404, "no such page"), (500, "{}"), (200, "no JSON")])
def test_what_cannot_be_fetched_is_an_error(status: int, text: str) -> None:
    with (
        scripted_http(lambda path, body: (status, text)) as address,
        pytest.raises(RemoteError, match="GET /any broke off"),
    ):
        fetched(address, "/any")
    with pytest.raises(RemoteError, match="GET /any broke off: ConnectError"):
        fetched("127.0.0.1:1", "/any")


@pytest.mark.usefixtures("package")
def test_the_packaged_server_serves_until_it_is_left() -> None:
    with LlamaServer("m.gguf", 2) as server:
        answer = said_to(server, "hello")
        assert (answer.prompt_tokens, answer.cached_tokens, answer.answer_tokens) == (5, 2, 1)
        library = f"xllamacpp {installed_version('xllamacpp')}"
        assert server.facts == {"library": library, "system": "AVX2 = 1 |", "context": 8192}
        assert server.server_pid == server.pid
    assert resident_bytes(server.pid) is None


def test_a_built_server_serves_until_it_is_left(program: str) -> None:
    with LlamaServer("m.gguf", 2, program, context=4096) as server:
        assert said_to(server, "hello").answer_tokens == 1
        assert server.facts == {"library": "llama-server b7", "context": 4096}
        assert server.server_pid != server.pid
    assert resident_bytes(server.pid) is None
    assert resident_bytes(server.server_pid) is None


@pytest.mark.usefixtures("package")
def test_a_server_that_does_not_start_says_why(program: str) -> None:
    with pytest.raises(PeerFailed, match="did not start: no such model"):
        LlamaServer("broken.gguf", 2)
    with pytest.raises(PeerFailed, match="llama-server did not start: exit status 1"):
        LlamaServer("broken.gguf", 2, program)


def test_a_program_that_neither_starts_nor_leaves_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = tmp_path / "stubborn"
    stubborn.write_text("#!/bin/sh\ntrap '' TERM\nwhile true; do sleep 0.05; done\n")
    stubborn.chmod(0o755)
    monkeypatch.setattr(llama_server, "START_SECONDS", 0.3)
    monkeypatch.setattr(llama_server, "STOP_SECONDS", 0.1)
    with pytest.raises(PeerFailed, match="it took too long"):
        llama_server._BuiltServer(str(stubborn), "m.gguf", 2, 0)


def test_what_llama_needs_is_named(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_llama_server("m.gguf", program)
    with pytest.raises(ConfigError, match=r"one \.gguf file, got some-directory"):
        require_llama_server("some-directory", program)
    with pytest.raises(ConfigError, match="must be a program that can be run"):
        require_llama_server("m.gguf", str(tmp_path / "absent"))
    monkeypatch.setattr(llama_server, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kakeya\[peers\].*--llama-server.*leave llama out of --ways"):
        require_llama_server("m.gguf", None)
    monkeypatch.setattr(llama_server, "find_spec", lambda name: object())
    require_llama_server("m.gguf", None)


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


@pytest.fixture
def own_settings() -> Iterator[None]:
    """The peer sets what it likes, in a process of its own. This process gets its settings back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    transformers.utils.logging.enable_progress_bar()


def asked(*requests: dict[str, object]) -> list[dict[str, object]]:
    replies = io.StringIO()
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    answer_lines(transformers_peer._Worker().answer, io.StringIO(lines), replies)
    return [json.loads(line) for line in replies.getvalue().splitlines()]


@pytest.mark.usefixtures("own_settings")
def test_transformers_itself_answers(chat_model: Path) -> None:
    opening = {"do": "open", "path": str(chat_model), "threads": 1}
    messages = [{"role": "user", "content": "hello there"}]
    say = {"do": "say", "messages": messages, "max_tokens": 4}
    longer = [*messages, {"role": "assistant", "content": "so"}, {"role": "user", "content": "and"}]
    opened, first, again, second = asked(opening, say, say, {**say, "messages": longer})
    assert opened == {
        "library": f"transformers {installed_version('transformers')}",
        "dtype": "bfloat16",
    }
    assert first == again
    assert 1 <= int(str(first["answer_tokens"])) <= 4
    assert int(str(second["prompt_tokens"])) > int(str(first["prompt_tokens"]))


def test_a_model_that_transformers_cannot_open_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="Error"):
        TransformersWay(str(tmp_path), 1, 1)


def test_what_transformers_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_transformers(str(tmp_path))
    with pytest.raises(ConfigError, match="needs the model's file or directory"):
        require_transformers(str(tmp_path / "absent"))
    monkeypatch.setattr(transformers_peer, "find_spec", {"transformers": "found"}.get)
    require_transformers(str(tmp_path))
    with pytest.raises(ConfigError, match=r"accelerate is not installed: pip install 'kakeya\[peers\]'"):
        require_transformers(str(tmp_path / "model.gguf"))
    monkeypatch.setattr(transformers_peer, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"transformers is not installed: pip install 'kakeya\[peers\]'"):
        require_transformers(str(tmp_path))

"""llama.cpp's server as a way to talk, in a process of its own."""

import os
import sys
from pathlib import Path

import pytest

from kakeya.bench.machine import installed_version
from kakeya.bench.peers import llama_server
from kakeya.bench.peers.llama_server import LlamaServer, fetched, require_llama_server
from kakeya.bench.usage import resident_bytes
from kakeya.errors import ConfigError, PeerFailed, RemoteError
from support.fakes import scripted_http

# Stands in for the package and for the program. It answers every request with its settings.
STAND_IN = (
    f"#!{sys.executable}\n"
    + """
import json, sys, threading, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace as Space

context, ready_at = 0, time.monotonic()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if time.monotonic() >= ready_at else 503)
        self.end_headers()
        settings = {"build_info": "b7", "default_generation_settings": {"n_ctx": context or 8192}}
        self.wfile.write(json.dumps(settings).encode())

    def log_message(self, *_):
        pass

def CommonParams():
    return Space(model=Space(path=""), cpuparams=Space(n_threads=-1), cpuparams_batch=Space(n_threads=-1))

def get_system_info():
    return "AVX2 = 1 | "

class Server:
    def __init__(self, params):
        global context
        if "broken" in params.model.path:
            raise RuntimeError("no such model")
        assert params.n_gpu_layers == 0
        assert params.cpuparams.n_threads == params.cpuparams_batch.n_threads == 2
        context = params.n_ctx // params.n_parallel
        print("libraries print")
        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{server.server_port}"

if __name__ == "__main__":
    given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    if "broken" in given["-m"]:
        sys.exit("no such model")
    assert (given["-t"], given["-tb"], given["-ngl"]) == ("2", "2", "0")
    context = int(given["-c"]) // int(given["-np"])
    ready_at += 0.2
    print("programs print")
    HTTPServer((given["--host"], int(given["--port"])), Handler).serve_forever()
"""
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is installed, for child processes."""
    (tmp_path / "xllamacpp.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def program(place: Path, text: str = STAND_IN) -> str:
    path = place / "llama-server"
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.mark.usefixtures("package")
def test_the_packaged_server_serves_until_it_is_left() -> None:
    with LlamaServer("m.gguf", 2, context=2048) as server:
        assert fetched(server.address, "/health")["build_info"] == "b7"
        library = f"xllamacpp {installed_version('xllamacpp')}"
        assert server.facts == {"library": library, "system": "AVX2 = 1 |", "context": 2048}
        assert server.server_pid == server.pid
    assert resident_bytes(server.pid) is None
    with pytest.raises(PeerFailed, match="did not start: no such model"):
        LlamaServer("broken.gguf", 2)


def test_a_built_server_serves_until_it_is_left(tmp_path: Path) -> None:
    with LlamaServer("m.gguf", 2, program(tmp_path), context=4096, slots=4) as server:
        assert fetched(server.address, "/health")["build_info"] == "b7"
        assert server.facts == {"library": "llama-server b7", "context": 1024}
        assert server.server_pid != server.pid
    assert resident_bytes(server.pid) is resident_bytes(server.server_pid) is None
    with pytest.raises(PeerFailed, match="llama-server did not start: exit status 1"):
        LlamaServer("broken.gguf", 2, program(tmp_path))


def test_a_program_that_neither_starts_nor_leaves_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = program(tmp_path, "#!/bin/sh\ntrap '' TERM\nwhile true; do sleep 0.05; done\n")
    monkeypatch.setattr(llama_server, "START_SECONDS", 0.3)
    monkeypatch.setattr(llama_server, "STOP_SECONDS", 0.1)
    with (
        pytest.raises(PeerFailed, match="it took too long"),
        llama_server._built(stubborn, "m.gguf", 2, 0, 1),
    ):
        pass


@pytest.mark.parametrize(("status", "text"), [(404, "no such page"), (500, "{}"), (200, "no JSON")])
def test_what_cannot_be_fetched_is_an_error(status: int, text: str) -> None:
    with (
        scripted_http(lambda path, body: (status, text)) as address,
        pytest.raises(RemoteError, match="GET /any broke off"),
    ):
        fetched(address, "/any")


def test_what_llama_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = program(tmp_path)
    require_llama_server("m.gguf", built)
    with pytest.raises(ConfigError, match=r"one \.gguf file, got some-directory; leave it"):
        require_llama_server("some-directory", built, without="leave it")
    with pytest.raises(ConfigError, match="must be a program that can be run"):
        require_llama_server("m.gguf", str(tmp_path / "absent"))
    monkeypatch.setattr(llama_server, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kakeya\[peers\].*--llama-server.*leave llama out of --ways"):
        require_llama_server("m.gguf", None)
    monkeypatch.setattr(llama_server, "find_spec", lambda name: object())
    require_llama_server("m.gguf", None)

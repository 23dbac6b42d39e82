"""llama.cpp's own server as a contestant, in a process of its own.

It is the server inside the `xllamacpp` package, or a `llama-server` program that somebody built. Its settings
are its defaults, prompt cache on, but for three: one slot, so that the whole context belongs to the one
conversation; the context that the model was trained for; and as many threads as we use.

Run as a program it answers `open`, one JSON request on a line of its input, with the server's address and
facts, and ends the server when its input ends.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TextIO

from kakeya.bench.contestants_http import fetched
from kakeya.bench.machine import installed_version
from kakeya.bench.peers import PeerProcess
from kakeya.errors import ConfigError, PeerFailed, RemoteError

PACKAGE = "xllamacpp"
# How long a program may take to load the model.
START_SECONDS = 120.0
# And to leave before it is made to: less than the patience that our parent has with us.
STOP_SECONDS = 5.0
# The context is as long as the model was trained for.
TRAINED_CONTEXT = 0


def require_llama_server(model_path: str, program: str | None) -> None:
    """Refuse a comparison that cannot be made. Raises ConfigError naming what is missing."""
    if Path(model_path).suffix != ".gguf":
        raise ConfigError(
            f"llama.cpp needs a model in one .gguf file, got {model_path}; leave it out with --no-llama"
        )
    if program is not None and not os.access(program, os.X_OK):
        raise ConfigError(f"llama-server must be a program that can be run, got {program}")
    if program is None and find_spec(PACKAGE) is None:
        raise ConfigError(
            "llama.cpp's server is not installed: pip install 'kakeya[peers]', name a program with "
            "--llama-server, or leave it out with --no-llama"
        )


class LlamaServer(PeerProcess):
    """The parent's end: a server at `address`. Leaving it as a context manager ends it."""

    name = "llama.cpp's server"

    def __init__(
        self, model_path: str, threads: int, program: str | None = None, context: int = TRAINED_CONTEXT
    ) -> None:
        settings = ("--context", str(context), *(() if program is None else ("--program", program)))
        super().__init__(model_path, threads, (), ("-m", "kakeya.bench.contestants_llama", *settings))
        self.address: str = self.facts.pop("address")
        self.server_pid: int = self.facts.pop("pid")


class _Server(Protocol):
    address: str
    pid: int

    def facts(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


class _PackagedServer:
    """The server in the package, in this process."""

    def __init__(self, path: str, threads: int, context: int) -> None:
        self._library = import_module(PACKAGE)
        params = self._library.CommonParams()
        params.model.path = path
        params.n_ctx, params.n_parallel, params.n_gpu_layers = context, 1, 0
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        try:
            self._server = self._library.Server(params)
        except RuntimeError as error:
            raise PeerFailed(f"llama.cpp's server did not start: {error}") from error
        self.address: str = self._server.listening_address.removeprefix("http://")
        self.pid = os.getpid()

    def facts(self) -> dict[str, Any]:
        system = str(self._library.get_system_info()).strip()
        return {"library": f"{PACKAGE} {installed_version(PACKAGE)}", "system": system}

    def close(self) -> None:
        del self._server


class _BuiltServer:
    """A `llama-server` program, as a child of this process."""

    def __init__(self, program: str, path: str, threads: int, context: int) -> None:
        self.address = f"127.0.0.1:{_free_port()}"
        host, port = self.address.split(":")
        work = ("-m", path, "-c", context, "-np", 1, "-t", threads, "-tb", threads, "-ngl", 0)
        command = [program, *map(str, work), "--host", host, "--port", port]
        # What it says goes where our own errors go; stdout is for replies.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
        self.pid = self._process.pid
        self._await()

    def facts(self) -> dict[str, Any]:
        return {"library": f"llama-server {fetched(self.address, '/props').get('build_info', '')}".strip()}

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _await(self) -> None:
        """Wait until the model is loaded. Raises PeerFailed, the process ended, when it never is."""
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            try:
                fetched(self.address, "/health")
                return
            except RemoteError:
                time.sleep(0.1)
        ended = self._process.poll()
        self.close()
        raise PeerFailed(f"llama-server did not start: {_why(ended)}")


def _why(ended: int | None) -> str:
    return "it took too long" if ended is None else f"exit status {ended}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(requests: TextIO, replies: TextIO, program: str | None, context: int) -> None:
    """Answer requests until they end; the server lives as long."""
    server: _Server | None = None
    try:
        for line in requests:
            request = json.loads(line)
            try:
                server = _opened(request, program, context)
                reply = _told(server)
            except (PeerFailed, RemoteError) as error:
                reply = {"error": str(error)}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    finally:
        if server is not None:
            server.close()


def _opened(request: dict[str, Any], program: str | None, context: int) -> _Server:
    if program is None:
        return _PackagedServer(request["path"], request["threads"], context)
    return _BuiltServer(program, request["path"], request["threads"], context)


def _told(server: _Server) -> dict[str, Any]:
    """The server's address and process, what it is, and the context it has in fact."""
    settings = fetched(server.address, "/props")["default_generation_settings"]
    return {"address": server.address, "pid": server.pid, **server.facts(), "context": settings["n_ctx"]}


def main(arguments: Sequence[str]) -> None:
    """The process. What libraries print must not mix with replies, so those get a descriptor of their own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--program")
    parser.add_argument("--context", type=int, default=TRAINED_CONTEXT)
    given = parser.parse_args(arguments)
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(sys.stdin, replies, given.program, given.context)


if __name__ == "__main__":
    main(sys.argv[1:])

"""llama.cpp's own server, in a process of its own.

It is the server inside the `xllamacpp` package, or a `llama-server` program that somebody built. Its settings
are its defaults, prompt cache on, but for three: one slot, so that the whole context belongs to the one
conversation; the context that the model was trained for; and as many threads as we use.

Run as a program it answers one request with the server's address and facts; the server ends with its input.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import httpx

from kakeya.bench.machine import installed_version
from kakeya.bench.processes import LineProcess, answer_lines
from kakeya.errors import ConfigError, PeerFailed, RemoteError

PACKAGE = "xllamacpp"
# How long a program may take to load the model.
START_SECONDS = 120.0
# And to leave before it is made to: less than the patience that our parent has with us.
STOP_SECONDS = 5.0


def require_llama_server(model_path: str, program: str | None) -> None:
    """Refuse a comparison that cannot be made. Raises ConfigError naming what is missing."""
    if Path(model_path).suffix != ".gguf":
        raise ConfigError(
            f"llama.cpp needs a model in one .gguf file, got {model_path}; leave llama out of --ways"
        )
    if program is not None and not os.access(program, os.X_OK):
        raise ConfigError(f"llama-server must be a program that can be run, got {program}")
    if program is None and find_spec(PACKAGE) is None:
        raise ConfigError(
            "llama.cpp's server is not installed: pip install 'kakeya[peers]', name a program with "
            "--llama-server, or leave llama out of --ways"
        )


class LlamaServer(LineProcess):
    """The parent's end: a server at `address`. Leaving it as a context manager ends it."""

    name = "llama.cpp's server"

    def __init__(self, model_path: str, threads: int, program: str | None = None, context: int = 0) -> None:
        super().__init__(("-m", "kakeya.bench.peers.llama_server"))
        request = {"path": model_path, "threads": threads, "program": program, "context": context}
        self.facts: dict[str, Any] = self.open(request)
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
        why = "it took too long" if ended is None else f"exit status {ended}"
        raise PeerFailed(f"llama-server did not start: {why}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fetched(address: str, path: str) -> dict[str, Any]:
    """A JSON object by GET. Raises RemoteError when there is none."""
    try:
        answer = httpx.get(f"http://{address}{path}", timeout=10.0, trust_env=False)
        return dict(answer.raise_for_status().json())
    except (httpx.HTTPError, ValueError) as error:
        raise RemoteError(f"GET {path} broke off: {error!r}") from error


class _Worker:
    """The server, once `open` was asked for."""

    def __init__(self) -> None:
        self.server: _Server | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        path, threads, program, context = (
            request[name] for name in ("path", "threads", "program", "context")
        )
        if program is None:
            self.server = _PackagedServer(path, threads, context)
        else:
            self.server = _BuiltServer(program, path, threads, context)
        settings = fetched(self.server.address, "/props")["default_generation_settings"]
        told = {"address": self.server.address, "pid": self.server.pid, **self.server.facts()}
        return {**told, "context": settings["n_ctx"]}


if __name__ == "__main__":
    worker = _Worker()
    try:
        answer_lines(worker.answer)
    finally:
        if worker.server is not None:
            worker.server.close()

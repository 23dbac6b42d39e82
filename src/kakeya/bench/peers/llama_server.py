"""llama.cpp's own server, in a process of its own.

It is the server inside the `xllamacpp` package, or a `llama-server` program that somebody built. Its settings
are its defaults, prompt cache on, but for three: the slots and the context that are asked for, by default one
slot that has all of the context that the model was trained for; and as many threads as we use.

Run as a program it answers one request with the server's address and facts; the server ends with its input.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from kakeya.bench.machine import installed_version
from kakeya.bench.processes import LineProcess, answer_lines
from kakeya.errors import ConfigError, PeerFailed, RemoteError

PACKAGE = "xllamacpp"
# How long a program may take to load the model.
START_SECONDS = 120.0
# And to leave before it is made to: less than the patience that our parent has with us.
STOP_SECONDS = 5.0


def require_llama_server(
    model_path: str, program: str | None, without: str = "leave llama out of --ways"
) -> None:
    """Refuse a comparison that cannot be made; `without` says how to do without it.

    Raises ConfigError naming what is missing.
    """
    if Path(model_path).suffix != ".gguf":
        raise ConfigError(f"llama.cpp needs a model in one .gguf file, got {model_path}; {without}")
    if program is not None and not os.access(program, os.X_OK):
        raise ConfigError(f"llama-server must be a program that can be run, got {program}")
    if program is None and find_spec(PACKAGE) is None:
        raise ConfigError(
            "llama.cpp's server is not installed: pip install 'kakeya[peers]', name a program with "
            f"--llama-server, or {without}"
        )


class LlamaServer(LineProcess):
    """The parent's end: a server at `address`. Leaving it as a context manager ends it."""

    name = "llama.cpp's server"

    def __init__(
        self, model_path: str, threads: int, program: str | None = None, context: int = 0, slots: int = 1
    ) -> None:
        super().__init__(("-m", "kakeya.bench.peers.llama_server"))
        request = {"path": model_path, "threads": threads, "program": program}
        self.facts: dict[str, Any] = self.open({**request, "context": context, "slots": slots})
        self.address: str = self.facts.pop("address")
        self.server_pid: int = self.facts.pop("pid")


@contextmanager
def _packaged(path: str, threads: int, context: int, slots: int) -> Iterator[dict[str, Any]]:
    """The server in the package, in this process."""
    library = import_module(PACKAGE)
    params = library.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers = context, slots, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    try:
        server = library.Server(params)
    except RuntimeError as error:
        raise PeerFailed(f"llama.cpp's server did not start: {error}") from error
    address = server.listening_address.removeprefix("http://")
    system = str(library.get_system_info()).strip()
    told = {"library": f"{PACKAGE} {installed_version(PACKAGE)}", "system": system}
    yield {"address": address, "pid": os.getpid(), **told}
    del server


@contextmanager
def _built(program: str, path: str, threads: int, context: int, slots: int) -> Iterator[dict[str, Any]]:
    """A `llama-server` program, as a child of this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host, port = probe.getsockname()
    work = ("-m", path, "-c", context, "-np", slots, "-t", threads, "-tb", threads, "-ngl", 0)
    command = [program, *map(str, work), "--host", host, "--port", str(port)]
    # What it says goes where our own errors go; stdout is for replies.
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    address = f"{host}:{port}"
    try:
        _await(process, address)
        library = f"llama-server {fetched(address, '/props').get('build_info', '')}".strip()
        yield {"address": address, "pid": process.pid, "library": library}
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _await(process: subprocess.Popen[bytes], address: str) -> None:
    """Wait until the model is loaded. Raises PeerFailed when it never is."""
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(RemoteError):
            fetched(address, "/health")
            return
        time.sleep(0.1)
    ended = process.poll()
    why = "it took too long" if ended is None else f"exit status {ended}"
    raise PeerFailed(f"llama-server did not start: {why}")


def fetched(address: str, path: str) -> dict[str, Any]:
    """A JSON object by GET. Raises RemoteError when there is none."""
    try:
        answer = httpx.get(f"http://{address}{path}", timeout=10.0, trust_env=False)
        return dict(answer.raise_for_status().json())
    except (httpx.HTTPError, ValueError) as error:
        raise RemoteError(f"GET {path} broke off: {error!r}") from error


def main() -> None:
    """The process: one request opens the server, which ends with this process's input."""
    with ExitStack() as stack:

        def opened(request: Mapping[str, Any]) -> dict[str, Any]:
            where = tuple(request[name] for name in ("path", "threads", "context", "slots"))
            program = request["program"]
            server = _packaged(*where) if program is None else _built(program, *where)
            told = stack.enter_context(server)
            settings = fetched(told["address"], "/props")["default_generation_settings"]
            return {**told, "context": settings["n_ctx"]}

        answer_lines(opened)


if __name__ == "__main__":
    main()

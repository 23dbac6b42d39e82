"""A `kakeya serve` of the benchmark's own: a fresh process on a free port, stopped at the end."""

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kakeya.client import AsyncClient, ServerInfo
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError

# The server's input is a pipe from us that nothing is ever written to: it ends when we do, however we do.
_LEAVE_WITH_PARENT = (
    "import os, signal, threading; "
    "leave = lambda: (os.read(0, 1), os.kill(os.getpid(), signal.SIGTERM)); "
    "threading.Thread(target=leave, daemon=True).start(); "
)
_PROGRAM = _LEAVE_WITH_PARENT + "from kakeya.cli import main; main()"
# The system finds a free port; the banner says which.
_ANY_PORT = "127.0.0.1:0"
_GRPC = re.compile(r"^kakeya \S+ serves .* on (\S+)\n", re.MULTILINE)
_HTTP = re.compile(r"^ +http +http://([^/\s]+)/.*\n", re.MULTILINE)
# How long a server may take to load, and to leave before it is made to.
_START_SECONDS = 300.0
_STOP_SECONDS = 15.0
# Settings of the user's that a measurement must not depend on; where models lie is no such setting.
_FOREIGN_PREFIX, _KEPT = "KAKEYA_", frozenset({"KAKEYA_CACHE_DIR"})


class ServerProcess:
    """A server of its own: once it is ready, its gRPC address and, where asked for, its HTTP address."""

    def __init__(
        self, model: str, config: EngineConfig, extra: Sequence[str] = (), *, http: bool = False
    ) -> None:
        self.address = ""
        self.http_address: str | None = None
        self._has_http = http
        # Closed by `stop`; a pipe nobody reads could fill up and stall the server.
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        listen = ("--bind", _ANY_PORT, "--http", _ANY_PORT if http else "off", "--log-level", "error")
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, "serve", *serve_flags(model, config), *listen, *extra],
            stdin=subprocess.PIPE,
            stdout=self._said,
            stderr=self._said,
            env={k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN_PREFIX) or k in _KEPT},
            # An interrupt at the terminal is for the benchmark, which stops the server itself.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> ServerInfo:
        """What the server runs, once it does. Raises ConfigError with its last words when it does not."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._find_addresses():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ConfigError(f"the server did not start: {self._last_words()}")
            await asyncio.sleep(0.05)
        async with AsyncClient(self.address) as client:
            return await client.server_info()

    async def stop(self) -> None:
        """End the process: politely, by force when it does not react."""
        self._process.terminate()
        try:
            await asyncio.to_thread(self._process.wait, _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._said.close()

    def _find_addresses(self) -> bool:
        """Read in the server's banner where it listens; False while there is none."""
        said = self._so_far()
        grpc, http = _GRPC.search(said), _HTTP.search(said)
        self.address = grpc[1] if grpc else ""
        self.http_address = http[1] if http else None
        return grpc is not None and (http is not None or not self._has_http)

    def _last_words(self) -> str:
        """Its own words if it had any, which others may have been put after."""
        lines = self._so_far().strip().splitlines()
        ended = self._process.poll()
        silence = "it took too long" if ended is None else f"exit status {ended}"
        own = [line for line in lines if line.startswith("kakeya: ")]
        return (own or lines or [silence])[-1]

    def _so_far(self) -> str:
        self._said.seek(0)
        return self._said.read()


@asynccontextmanager
async def server_process(
    model: str, config: EngineConfig, extra: Sequence[str] = (), *, http: bool = False
) -> AsyncIterator[tuple[ServerProcess, ServerInfo]]:
    """A server that is ready, and what it says about itself. Raises ConfigError when it cannot start."""
    server = ServerProcess(model, config, extra, http=http)
    try:
        yield server, await server.ready()
    finally:
        await server.stop()


def serve_flags(model: str, config: EngineConfig) -> list[str]:
    """The same engine as flags of `kakeya serve`. Memory is bounded by the capacity, idle sessions stay."""
    settings = {
        "model": model,
        "backend": config.backend,
        "sink": config.cache.sink,
        "window": config.cache.window,
        "dtype": config.dtype,
        "weights": config.weights,
        "numerics": config.numerics,
        "kernels": config.kernels,
        "threads": config.threads,
        "max-batch-tokens": config.asked_batch_tokens,
        "capacity": config.capacity,
        "memory-budget": "100%",
        "session-idle-ttl-s": 0,
    }
    given = {name: value for name, value in settings.items() if value is not None}
    return [part for name, value in given.items() for part in (f"--{name}", str(value))]

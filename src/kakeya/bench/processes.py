"""Processes that benchmarks start: programs that answer lines, and servers of our own."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self, TextIO

from kakeya.bench.machine import public_name, public_proposers
from kakeya.bench.usage import resident_bytes
from kakeya.errors import ConfigError, KakeyaError, PeerFailed
from kakeya.options import SECRETS, ComputeOptions, EngineOptions, flags

if TYPE_CHECKING:
    from kakeya.client import AsyncClient, ServerInfo

# How long a process may take to leave before it is made to.
PATIENCE_SECONDS = 15.0
# How long a server may take to load.
START_SECONDS = 300.0


class ChildProcess:
    """A Python program in a process of its own that leaves when its input ends, so also when we do.

    A context manager; leaving it ends the process. With `own_session` no Ctrl-C of the terminal reaches it,
    and what it started ends with it.
    """

    name = "the process"

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        stdout: int | None = subprocess.PIPE,
        env: Mapping[str, str] | None = None,
        own_session: bool = False,
    ) -> None:
        self._own_session = own_session
        # Closed by `close`; a pipe nobody reads could fill up and stall the process.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=self._said if stdout is None else stdout,
            stderr=self._said,
            env=env,
            text=True,
            start_new_session=own_session,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        """End the process: politely by closing its input, by force when it does not react."""
        try:
            self._process.communicate(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.communicate()
        self._said.close()

    def kill(self) -> None:
        """End it by force, with all that it started in a session of its own."""
        if not self._own_session:
            self._process.kill()
            return
        with suppress(ProcessLookupError):  # it is gone, and so is all that it started
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def said(self) -> str:
        """All that it has written so far on its error stream."""
        # The process writes where its file stands, and ours is the same: reading must not move it.
        handle = self._said.fileno()
        return os.pread(handle, os.fstat(handle).st_size, 0).decode("utf-8", "replace")

    def last_words(self) -> str:
        """The last line that it wrote; one of ours if there is any, which others may have been put after."""
        lines = self.said().strip().splitlines()
        ended = self._process.poll()
        silence = "it took too long" if ended is None else f"exit status {ended}, it said nothing"
        own = [line for line in lines if line.startswith("kakeya: ")]
        return (own or lines or [silence])[-1]


class LineProcess(ChildProcess):
    """One that answers a line of JSON for each line of JSON it is sent; see `answer_lines`.

    `name` stands in what is said when it breaks, which raises PeerFailed.
    """

    def open(self, request: Any) -> Any:
        """The answer to what opens it; the process does not outlive a failure."""
        try:
            return self.ask(request)
        except BaseException:
            self.close()
            raise

    def ask(self, request: Any) -> Any:
        """The answer. Raises PeerFailed when it says that it cannot, and when it is gone."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._process.wait()
            raise PeerFailed(f"{self.name} ended unexpectedly: {self.last_words()}")
        reply = json.loads(line)
        if isinstance(reply, dict) and "error" in reply:
            raise PeerFailed(reply["error"])
        return reply

    def ask_within(self, seconds: float, request: Any) -> Any:
        """The answer. The process is killed when it takes longer."""
        timer, began = threading.Timer(seconds, self.kill), time.monotonic()
        timer.start()
        try:
            return self.ask(request)
        except PeerFailed:
            if time.monotonic() - began < seconds:
                raise
            last = f"the last it said: {self.last_words()}"
            raise PeerFailed(f"{self.name} gave no answer within {seconds:g} s; {last}") from None
        finally:
            timer.cancel()


def answer_lines(
    answer: Callable[[Any], Any], requests: TextIO | None = None, replies: TextIO | None = None
) -> None:
    """The other end of a LineProcess: one reply for each request, until they end.

    What goes wrong becomes a reply with an error. What libraries print must not mix with replies, so those
    get a descriptor of their own, and prints go where errors go.
    """
    if replies is None:
        with os.fdopen(os.dup(sys.stdout.fileno()), "w") as out:
            os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
            answer_lines(answer, requests or sys.stdin, out)
        return
    for line in requests or sys.stdin:
        try:
            reply = answer(json.loads(line))
        except KakeyaError as error:
            reply = {"error": str(error)}
        except (OSError, ValueError, RuntimeError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


# The server's input is a pipe from us that nothing is ever written to: it ends when we do, however we do.
_LEAVE_WITH_PARENT = (
    "import os, signal, threading; "
    "leave = lambda: (os.read(0, 1), os.kill(os.getpid(), signal.SIGTERM)); "
    "threading.Thread(target=leave, daemon=True).start(); "
)
KAKEYA = _LEAVE_WITH_PARENT + "from kakeya.cli import main; main()"
"""`kakeya` as a program for `python -c`, with a pipe as its input."""
# The system finds a free port; the banner says which.
_ANY_PORT = "127.0.0.1:0"
_GRPC = re.compile(r"^kakeya \S+ (?:serves|proposes with) .* on (\S+)\n", re.MULTILINE)
_HTTP = re.compile(r"^ +http +http://([^/\s]+)/.*\n", re.MULTILINE)
# Settings of the user's that a measurement must not depend on; where models lie is no such setting.
_FOREIGN_PREFIX, _KEPT = "KAKEYA_", frozenset({"KAKEYA_CACHE_DIR"})


def clean_environment() -> dict[str, str]:
    """Ours without the user's settings of `kakeya`."""
    return {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN_PREFIX) or k in _KEPT}


def serve_flags(engine: EngineOptions, capacity: int) -> list[str]:
    """The engine as flags of `kakeya serve`. Memory is bounded by the capacity, and idle sessions stay.

    Its secrets are no flags: see `serve_secrets`.
    """
    settings = {name: getattr(engine, name) for name in EngineOptions.__dataclass_fields__}
    return flags({**settings, "capacity": capacity, "memory_budget": "100%", "session_idle_ttl_s": 0})


def serve_secrets(engine: EngineOptions) -> dict[str, str]:
    """The engine's secrets as environment variables: whoever lists processes reads their command lines."""
    given = {name: getattr(engine, name) for name in SECRETS & EngineOptions.__dataclass_fields__.keys()}
    return {f"KAKEYA_{name.upper()}": value for name, value in given.items() if value is not None}


def propose_flags(engine: ComputeOptions, capacity: int) -> list[str]:
    """The proposer of an engine, and how it computes, as flags of `kakeya propose`."""
    names = ComputeOptions.__dataclass_fields__.keys() - {"model"}
    settings = {name: getattr(engine, name) for name in sorted(names)}
    return flags({**settings, "capacity": capacity, "memory_budget": "100%"})


class VerbProcess(ChildProcess):
    """A verb of `kakeya` that listens: once it is ready, where, for gRPC and, if asked for, for HTTP.

    It runs on some `cores` alone, if any are given.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        secrets: Mapping[str, str] | None = None,
        http: bool = False,
        cores: Sequence[int] = (),
    ) -> None:
        self.address = self.http_address = ""
        self._has_http = http
        pinned = f"import os; os.sched_setaffinity(0, {list(cores)}); " if cores else ""
        super().__init__(
            ["-c", pinned + KAKEYA, *arguments],
            stdout=None,
            env={**clean_environment(), **(secrets or {})},
            # An interrupt at the terminal is for the benchmark, which stops the server itself.
            own_session=True,
        )

    async def ready(self) -> None:
        """Wait until its banner says where it listens. Raises ConfigError with its last words."""
        deadline = time.monotonic() + START_SECONDS
        while not self.address or (self._has_http and not self.http_address):
            if not self.running or time.monotonic() > deadline:
                raise ConfigError(f"the server did not start: {self.last_words()}")
            await asyncio.sleep(0.05)
            found = (pattern.search(self.said()) for pattern in (_GRPC, _HTTP))
            self.address, self.http_address = (each[1] if each else "" for each in found)


class ServerProcess(VerbProcess):
    """A `kakeya serve`."""

    def __init__(
        self,
        engine: EngineOptions,
        capacity: int,
        extra: Sequence[str] = (),
        *,
        http: bool = False,
        cores: Sequence[int] = (),
    ) -> None:
        listen = {"bind": _ANY_PORT, "http": _ANY_PORT if http else "off", "log-level": "error"}
        arguments = ["serve", *serve_flags(engine, capacity), *flags(listen), *extra]
        super().__init__(arguments, secrets=serve_secrets(engine), http=http, cores=cores)


@dataclass(frozen=True)
class Server:
    """A server that is ready: a client of it, and what it says about itself. `pid` may be unknown."""

    client: "AsyncClient"
    info: "ServerInfo"
    address: str
    http_address: str = ""
    pid: int | None = None

    def resident_bytes(self) -> int | None:
        return None if self.pid is None else resident_bytes(self.pid)

    @property
    def facts(self) -> dict[str, Any]:
        """As reports tell it."""
        names = {
            "model_id": public_name(self.info.model_id),
            "proposer": public_proposers(self.info.proposer),
        }
        return {**asdict(self.info), **names}


@asynccontextmanager
async def running_server(
    address: str, http_address: str = "", pid: int | None = None, api_key: str | None = None
) -> AsyncIterator[Server]:
    """One that somebody else started and ends."""
    from kakeya.client import AsyncClient  # `bench gpu` also runs where protobuf is not installed

    async with AsyncClient(address, api_key=api_key) as client:
        yield Server(client, await client.server_info(), address, http_address, pid)


@asynccontextmanager
async def server_process(
    engine: EngineOptions,
    capacity: int,
    extra: Sequence[str] = (),
    *,
    http: bool = False,
    cores: Sequence[int] = (),
) -> AsyncIterator[Server]:
    """One of our own. Raises ConfigError when it cannot start."""
    process = ServerProcess(engine, capacity, extra, http=http, cores=cores)
    try:
        await process.ready()
        async with running_server(process.address, process.http_address, process.pid) as server:
            yield server
    finally:
        await asyncio.to_thread(process.close)


@asynccontextmanager
async def proposer_process(
    engine: ComputeOptions, capacity: int, cores: Sequence[int] = ()
) -> AsyncIterator[VerbProcess]:
    """A `kakeya propose` that is ready. Raises ConfigError when it cannot start."""
    listen = flags({"bind": _ANY_PORT, "log-level": "error"})
    process = VerbProcess(["propose", *propose_flags(engine, capacity), *listen], cores=cores)
    try:
        await process.ready()
        yield process
    finally:
        await asyncio.to_thread(process.close)

"""Other processes: what they use of the machine, and those that benchmarks start.

`psutil` is imported where it is used: `bench gpu` also runs where it is not installed.
"""

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self, TextIO

from kakeya.bench.machine import public_name
from kakeya.errors import ConfigError, KakeyaError, PeerFailed
from kakeya.options import EngineOptions, flags

if TYPE_CHECKING:
    from kakeya.client import ServerInfo

# How long a process may take to leave before it is made to.
PATIENCE_SECONDS = 15.0
# How long a server may take to load.
START_SECONDS = 300.0


def resident_bytes(pid: int | None = None) -> int | None:
    """Memory of a process, or of this one, that is in RAM right now; None once it is gone."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        # A process that has ended and that nobody waited for holds nothing.
        return psutil.Process(pid).memory_info().rss or None
    return None


class Bystanders:
    """How much of the machine others than `ours` use from now on: noise that no median removes."""

    def __init__(self, ours: Sequence[int]) -> None:
        self._ours = ours
        self._began = time.perf_counter()
        self._busy = self._others_busy_seconds()

    def share(self) -> float | None:
        """Of all cores together, time stolen by a hypervisor included; None when one of ours is gone."""
        busy = self._others_busy_seconds()
        if busy is None or self._busy is None:
            return None
        wall = time.perf_counter() - self._began
        return max(0.0, busy - self._busy) / (wall * (os.cpu_count() or 1))

    def _others_busy_seconds(self) -> float | None:
        import psutil

        times = psutil.cpu_times()._asdict()
        # Guests are in `user` and `nice` already.
        busy = sum(times.values()) - sum(times.get(name, 0.0) for name in _NOT_BUSY)
        try:
            own = [psutil.Process(pid).cpu_times() for pid in self._ours]
        except psutil.NoSuchProcess:
            return None
        return float(busy - sum(each.user + each.system for each in own))


_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")


def raise_descriptor_limit(wanted: int) -> dict[str, int]:
    """Allow this process and its children `wanted` open files, or as many as the system lets it ask for.

    Returns the limits before and after, and what was wanted.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if before != resource.RLIM_INFINITY and ceiling > before:
        resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
    after, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"wanted": wanted, "before": before, "after": after}


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
        self._said = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
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
        with suppress(BrokenPipeError):  # it is gone already, with the request it never read
            self._pipe(self._process.stdin).close()
        try:
            self._process.wait(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def said(self) -> str:
        """All that it has written so far on its error stream."""
        self._said.seek(0)
        return self._said.read()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


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
        stdin, stdout = self._pipe(self._process.stdin), self._pipe(self._process.stdout)
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            line = stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerFailed(f"{self.name} ended unexpectedly: {self._last_words()}")
        reply = json.loads(line)
        if isinstance(reply, dict) and "error" in reply:
            raise PeerFailed(reply["error"])
        return reply

    def ask_within(self, seconds: float, request: Any) -> Any:
        """The answer. The process is killed when it takes longer."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(seconds, give_up)
        timer.start()
        try:
            return self.ask(request)
        except PeerFailed:
            if not late.is_set():
                raise
            last = f"the last it said: {self._last_words()}"
            raise PeerFailed(f"{self.name} gave no answer within {seconds:g} s; {last}") from None
        finally:
            timer.cancel()

    def _last_words(self) -> str:
        self._process.wait()
        lines = self.said().strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.returncode}, it said nothing"


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
_PROGRAM = _LEAVE_WITH_PARENT + "from kakeya.cli import main; main()"
# The system finds a free port; the banner says which.
_ANY_PORT = "127.0.0.1:0"
_GRPC = re.compile(r"^kakeya \S+ serves .* on (\S+)\n", re.MULTILINE)
_HTTP = re.compile(r"^ +http +http://([^/\s]+)/.*\n", re.MULTILINE)
# Settings of the user's that a measurement must not depend on; where models lie is no such setting.
_FOREIGN_PREFIX, _KEPT = "KAKEYA_", frozenset({"KAKEYA_CACHE_DIR"})


def serve_flags(engine: EngineOptions, capacity: int) -> list[str]:
    """The engine as flags of `kakeya serve`. Memory is bounded by the capacity, and idle sessions stay."""
    settings = {name: getattr(engine, name) for name in EngineOptions.__dataclass_fields__}
    return flags({**settings, "capacity": capacity, "memory_budget": "100%", "session_idle_ttl_s": 0})


class ServerProcess(ChildProcess):
    """A `kakeya serve`: once it is ready, its gRPC address and, where asked for, its HTTP address."""

    def __init__(
        self, engine: EngineOptions, capacity: int, extra: Sequence[str] = (), *, http: bool = False
    ) -> None:
        self.address = ""
        self.http_address: str | None = None
        self._has_http = http
        listen = {"bind": _ANY_PORT, "http": _ANY_PORT if http else "off", "log-level": "error"}
        super().__init__(
            ["-c", _PROGRAM, "serve", *serve_flags(engine, capacity), *flags(listen), *extra],
            stdout=None,
            env={k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN_PREFIX) or k in _KEPT},
            # An interrupt at the terminal is for the benchmark, which stops the server itself.
            own_session=True,
        )

    async def ready(self) -> "ServerInfo":
        """What the server runs, once it does. Raises ConfigError with its last words when it does not."""
        deadline = time.monotonic() + START_SECONDS
        while not self._find_addresses():
            if not self.running or time.monotonic() > deadline:
                raise ConfigError(f"the server did not start: {self._last_words()}")
            await asyncio.sleep(0.05)
        from kakeya.client import AsyncClient  # `bench gpu` also runs where protobuf is not installed

        async with AsyncClient(self.address) as client:
            return await client.server_info()

    def _find_addresses(self) -> bool:
        """Read in the server's banner where it listens; False while there is none."""
        said = self.said()
        grpc, http = _GRPC.search(said), _HTTP.search(said)
        self.address = grpc[1] if grpc else ""
        self.http_address = http[1] if http else None
        return grpc is not None and (http is not None or not self._has_http)

    def _last_words(self) -> str:
        """Its own words if it had any, which others may have been put after."""
        lines = self.said().strip().splitlines()
        ended = self._process.poll()
        silence = "it took too long" if ended is None else f"exit status {ended}"
        own = [line for line in lines if line.startswith("kakeya: ")]
        return (own or lines or [silence])[-1]


def server_facts(info: "ServerInfo") -> dict[str, Any]:
    """What a server says about itself, as reports tell it."""
    return {**asdict(info), "model_id": public_name(info.model_id)}


@asynccontextmanager
async def server_process(
    engine: EngineOptions, capacity: int, extra: Sequence[str] = (), *, http: bool = False
) -> AsyncIterator[tuple[ServerProcess, "ServerInfo"]]:
    """A server that is ready, and what it says about itself. Raises ConfigError when it cannot start."""
    server = ServerProcess(engine, capacity, extra, http=http)
    try:
        yield server, await server.ready()
    finally:
        await asyncio.to_thread(server.close)

"""Real gRPC servers over a tiny model: in this process, on an event loop of its own, or as a process."""

import asyncio
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import grpc

from kakeya.client import AsyncClient
from kakeya.config import CacheConfig, EngineConfig, RuntimeConfig
from kakeya.grpc_server import Server
from kakeya.runtime import Runtime
from kakeya.serving.config import ServerConfig
from kakeya.types import DType, Numerics, ShareBeginnings, WeightFormat
from kakeya.wire import runtime_pb2 as pb, runtime_pb2_grpc
from support.tiny import write_chat_model
from support.untraced import untraced_environment

T = TypeVar("T")

VOCAB = 320
# Of the server process that the tests of the client share.
KEY, OTHER_KEY = "first-key", "second-key"
CAPACITY = 6
ANY_PORT = ServerConfig(bind="127.0.0.1:0", shutdown_grace_s=5.0)
ENGINE = EngineConfig(
    cache=CacheConfig(sink=2, window=30, spare=8),
    capacity=4,
    numerics=Numerics.EXACT,
    dtype=DType.FLOAT32,
    weights=WeightFormat.FLOAT32,
    threads=1,
    prefill_block=16,
    max_batch_tokens=64,
    # Tests see by the cached tokens whether a session was continued.
    share_beginnings=ShareBeginnings.OFF,
)


def write_model(directory: Path) -> Path:
    """The tiny chat model, its vocabulary padded beyond its tokenizer's."""
    return write_chat_model(directory, VOCAB)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """One loop for all servers of this process: gRPC's poller serves one at a time."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="test-servers", daemon=True).start()
    return loop


def on_loop(work: Coroutine[Any, Any, T], timeout: float = 30.0) -> T:
    """Run a coroutine on the servers' loop and wait for it here."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result(timeout)


def start(config: ServerConfig = ANY_PORT) -> Server:
    """A server that listens and has no runtime yet."""

    async def started() -> Server:
        server = Server(config)
        await server.start()
        return server

    return on_loop(started())


@contextmanager
def serving(
    model: Path,
    config: ServerConfig = ANY_PORT,
    engine: EngineConfig = ENGINE,
    sessions: RuntimeConfig = RuntimeConfig(),  # noqa: B008 (frozen)
) -> Iterator[tuple[Server, Runtime]]:
    """A server with its runtime, drained without grace at the end."""
    runtime = Runtime.open(str(model), engine, sessions)
    server = start(config)
    on_loop(server.open(runtime))
    try:
        yield server, runtime
    finally:
        on_loop(server.drain(0))


@contextmanager
def connected(
    address: str, credentials: grpc.ChannelCredentials | None = None
) -> Iterator[runtime_pb2_grpc.RuntimeServiceStub]:
    """A plain stub on a channel of its own."""
    with channel_to(address, credentials) as channel:
        yield runtime_pb2_grpc.RuntimeServiceStub(channel)


def channel_to(address: str, credentials: grpc.ChannelCredentials | None = None) -> grpc.Channel:
    # Its own connection, so that one test's channel never carries another's calls.
    options = [("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, credentials, options)


def new_session(stub: Any, tokens: list[int] | None = None, **call: Any) -> str:
    """A session that never ends on a token of its own, with some history."""
    session_id: str = stub.CreateSession(pb.CreateSessionRequest(ignore_eos=True), **call).session_id
    if tokens:
        stub.AppendTokens(pb.AppendTokensRequest(session_id=session_id, token_ids=tokens), **call)
    return session_id


def token_ids(events: Iterator[pb.GenerateEvent]) -> list[int]:
    return [event.token.id for event in events if event.WhichOneof("event") == "token"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(model: Path, *flags: str) -> Iterator[str]:
    """The server's address, once it serves and while it does."""
    address = f"127.0.0.1:{free_port()}"
    program = "from kakeya.cli import main; main()"
    command: Sequence[str] = [sys.executable, "-c", program, "serve"]
    listen = ("--bind", address, "--http", "off")
    process = subprocess.Popen(
        [*command, "--model", str(model), *listen, "--log-level", "warning", *flags],
        env=untraced_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        banner = process.stderr.readline()
        assert f"on {address}" in banner, banner + process.stderr.read()
        yield address
    finally:
        process.terminate()
        said = process.communicate(timeout=20)[1]
        assert process.returncode == 0, said


class MortalServer:
    """A server process over a state directory that can be killed and started again, at the same address."""

    def __init__(self, model: Path, state: Path, *flags: str) -> None:
        self.address, self.http = (f"127.0.0.1:{free_port()}" for _ in range(2))
        program = "from kakeya.cli import main; main()"
        listen = ("--bind", self.address, "--http", self.http)
        kept = ("--model", str(model), "--state-dir", str(state), "--log-level", "warning")
        self._command = [sys.executable, "-c", program, "serve", *kept, *listen, *flags]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it, and wait until it serves."""
        self._process = subprocess.Popen(
            self._command, env=untraced_environment(), stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        said = []
        while f"on {self.address}" not in (said[-1] if said else ""):
            said.append(self._process.stderr.readline())
            assert said[-1], "".join(said)

    def kill(self) -> None:
        """End it at once, as nobody can prevent."""
        assert self._process is not None
        self._process.kill()
        self._process.communicate(timeout=20)

    def __enter__(self) -> "MortalServer":
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def close_sessions(address: str) -> None:
    """Close every session of a server without keys, by its gRPC address."""

    async def closed() -> None:
        async with AsyncClient(address) as client:
            for info in await client.list_sessions():
                await client.session(info.session_id).close()

    asyncio.run(closed())


def drive(address: str, scenario: Callable[[AsyncClient], Awaitable[None]]) -> None:
    """Play a scenario with a client of the server that has keys."""

    async def played() -> None:
        async with AsyncClient(address, api_key=KEY) as client:
            await scenario(client)

    asyncio.run(played())

"""A thousand bad clients: the good one notices nothing, and nothing is left of them."""

import asyncio
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from kakeya.grpc_server import Server
from kakeya.runtime import Runtime
from kakeya.wire import runtime_pb2 as pb
from support import serving
from support.serving import new_session, token_ids

pytestmark = [pytest.mark.untraced, pytest.mark.slow]

CLIENTS_OF_EACH_KIND = 200
PROMPT = [5, 6, 7]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class GoodClient(threading.Thread):
    """Takes the same first turn on new sessions, again and again."""

    def __init__(self, address: str) -> None:
        super().__init__()
        self._address = address
        self._enough = threading.Event()
        self.heard: list[tuple[int, ...]] = []
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            with serving.connected(self._address) as stub:
                while not self._enough.is_set():
                    self.heard.append(self._turn(stub))
        except grpc.RpcError as error:
            self.failure = error

    def _turn(self, stub: Any) -> tuple[int, ...]:
        session_id = new_session(stub, PROMPT)
        events = stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=8), timeout=20)
        spoken = tuple(token_ids(events))
        stub.CloseSession(pb.CloseSessionRequest(session_id=session_id))
        return spoken

    def stop(self) -> None:
        self._enough.set()
        self.join(20)


@pytest.fixture(scope="module")
def chaos(model: Path) -> Iterator[tuple[Server, Runtime]]:
    with serving.serving(model) as live:
        yield live


def open_socket(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def stalls(address: str, _: str) -> None:
    """Connects, says how it would begin, and then nothing."""
    with open_socket(address) as connection:
        connection.sendall(PREFACE[: os.urandom(1)[0] % len(PREFACE)])


def sends_garbage(address: str, _: str) -> None:
    with open_socket(address) as connection:
        try:
            connection.sendall((PREFACE if os.urandom(1)[0] % 2 else b"") + os.urandom(512))
            connection.recv(64)
        except OSError:
            pass  # the server hung up, as it should


def dies_in_mid_stream(address: str, session_id: str) -> None:
    deadline = time.monotonic() + 20
    with serving.connected(address) as stub:
        while True:
            call = stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=1_000_000), timeout=20)
            try:
                next(call)
                return
            except grpc.RpcError as error:  # the one that died here before it may not have been missed yet
                if error.code() is not grpc.StatusCode.ABORTED or time.monotonic() > deadline:
                    raise


def floods(address: str, session_id: str) -> None:
    """Many calls at once, none waited for."""
    with serving.connected(address) as stub:
        for _ in range(10):
            stub.GetSessionInfo.future(pb.GetSessionInfoRequest(session_id=session_id))


def asks_nonsense(address: str, session_id: str) -> None:
    """No handler raises on purpose: this one's bytes are no message."""
    with serving.channel_to(address) as channel:
        call = channel.unary_unary("/kakeya.v1.RuntimeService/AppendTokens")
        with pytest.raises(grpc.RpcError):
            call(b"\xff" * 20, timeout=20)


def settled(count: Callable[[], int], limit: int, seconds: float = 10.0) -> int:
    """The count, once it is within the limit or time is up."""
    deadline = time.monotonic() + seconds
    while (now := count()) > limit and time.monotonic() < deadline:
        time.sleep(0.02)
    return now


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def tasks() -> int:
    async def count() -> int:
        return len(asyncio.all_tasks())

    return serving.on_loop(count())


@pytest.mark.unwatched
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files as Linux lists them")
def test_a_thousand_bad_clients_leave_nothing(
    chaos: tuple[Server, Runtime], caplog: pytest.LogCaptureFixture
) -> None:
    server, runtime = chaos
    kinds = (stalls, sends_garbage, dies_in_mid_stream, floods, asks_nonsense)
    with serving.connected(server.address) as stub:
        victims = [new_session(stub, PROMPT) for _ in range(2)]
        good = GoodClient(server.address)
        good.start()
        for bad in kinds:  # what is made once is made now: threads, pollers
            bad(server.address, victims[0])
        files, threads, work = open_files(), threading.active_count(), tasks()
        for number, bad in itertools.product(range(CLIENTS_OF_EACH_KIND), kinds):
            bad(server.address, victims[number % 2])
        good.stop()
        assert good.failure is None
        assert len(good.heard) > 10
        assert len(set(good.heard)) == 1
        assert len(good.heard[0]) == 8
        for session_id in victims:
            stub.CloseSession(pb.CloseSessionRequest(session_id=session_id))
        assert runtime.list_sessions(owner="local")[0] == []
        assert runtime._pool.free_count == serving.ENGINE.capacity
    assert settled(tasks, work) <= work
    assert settled(open_files, files) <= files
    # Calls may have woken more of the workers; those are kept, up to their limit.
    others = [t for t in threading.enumerate() if not t.name.startswith("kakeya-rpc")]
    assert len(others) <= threads

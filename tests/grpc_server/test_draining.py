"""A drain: what can finish does, the others are told, nothing is left."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from kakeya.runtime import Runtime
from kakeya.wire import runtime_pb2 as pb
from support import serving
from support.serving import new_session, token_ids

Code = grpc.StatusCode
PROMPT = [5, 6, 7]


class Reading:
    """A generate that a thread reads to its end."""

    def __init__(self, stub: Any, session_id: str, count: int) -> None:
        self.tokens: list[int] = []
        self.ending: object = None
        self._call = stub.Generate(pb.GenerateRequest(session_id=session_id, max_tokens=count))
        self.tokens.append(next(self._call).token.id)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        try:
            for event in self._call:
                if event.WhichOneof("event") == "token":
                    self.tokens.append(event.token.id)
                else:
                    self.ending = event.done.stop_reason
        except grpc.RpcError as error:
            self.ending = error.code()

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


def start(model: Path) -> tuple[Any, Runtime]:
    runtime = Runtime.open(str(model), serving.ENGINE)
    server = serving.start()
    serving.on_loop(server.open(runtime))
    return server, runtime


def test_a_drain_lets_finish_what_can(model: Path) -> None:
    server, _ = start(model)
    with serving.connected(server.address) as stub:
        reading = Reading(stub, new_session(stub, PROMPT), 300)
        assert serving.on_loop(server.drain(20)) is True
        reading.join()
    assert reading.ending == pb.MAX_TOKENS
    assert len(reading.tokens) == 300


def test_a_drain_tells_the_others_and_keeps_to_its_grace(model: Path) -> None:
    server, _ = start(model)
    with serving.connected(server.address) as stub:
        endless = Reading(stub, new_session(stub, PROMPT), 10_000_000)
        short = Reading(stub, new_session(stub, PROMPT), 50)
        began = time.monotonic()
        assert serving.on_loop(server.drain(1.0)) is False
        assert time.monotonic() - began < 10
        endless.join()
        short.join()
        assert endless.ending is Code.UNAVAILABLE
        assert (short.ending, len(short.tokens)) == (pb.MAX_TOKENS, 50)
        with pytest.raises(grpc.RpcError) as gone:
            new_session(stub, timeout=5)
        assert gone.value.code() is Code.UNAVAILABLE


def test_a_draining_server_takes_no_new_work_but_answers(model: Path) -> None:
    server, _ = start(model)
    with serving.connected(server.address) as stub:
        session_id = new_session(stub, PROMPT)
        endless = Reading(stub, new_session(stub, PROMPT), 10_000_000)
        drain = threading.Thread(target=lambda: serving.on_loop(server.drain(2.0)))
        drain.start()
        time.sleep(0.3)
        for method, request in (
            (stub.CreateSession, pb.CreateSessionRequest()),
            (stub.AppendTokens, pb.AppendTokensRequest(session_id=session_id, token_ids=[1])),
            (stub.Generate, pb.GenerateRequest(session_id=session_id, max_tokens=1)),
            (stub.ForkSession, pb.ForkSessionRequest(session_id=session_id)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                list(method(request))
            assert refused.value.code() is Code.UNAVAILABLE
            assert dict(refused.value.trailing_metadata())["kakeya-error"] == "Unavailable"
        info = stub.GetSessionInfo(pb.GetSessionInfoRequest(session_id=session_id))
        assert info.history_length == 3
        stub.CloseSession(pb.CloseSessionRequest(session_id=session_id))
        drain.join(20)
        endless.join()


def test_a_client_that_does_not_read_cannot_hold_up_a_drain(model: Path) -> None:
    server, _ = start(model)
    with serving.connected(server.address) as stub:
        stalled = stub.Generate(
            pb.GenerateRequest(session_id=new_session(stub, PROMPT), max_tokens=10_000_000)
        )
        next(stalled)
        began = time.monotonic()
        serving.on_loop(server.drain(1.0))
        assert time.monotonic() - began < 10
        with pytest.raises(grpc.RpcError):
            token_ids(stalled)


def test_nothing_is_left_behind(model: Path) -> None:
    """The threads of the engine and of the calls end with the server."""
    before = set(threading.enumerate())
    server, _ = start(model)
    with serving.connected(server.address) as stub:
        new_session(stub, PROMPT)
    assert {"kakeya-engine"} <= {thread.name for thread in set(threading.enumerate()) - before}
    serving.on_loop(server.drain(0))
    deadline = time.monotonic() + 5
    while ours := [t.name for t in set(threading.enumerate()) - before if t.name.startswith("kakeya")]:
        assert time.monotonic() < deadline, ours
        time.sleep(0.01)


def test_a_signal_while_loading_ends_at_once() -> None:
    program = (
        "import asyncio, time\nfrom kakeya.serving import lifecycle\n"
        "from kakeya.config import ServerConfig\nfrom kakeya.grpc_server import Server\n"
        "def load():\n    print('loading', flush=True)\n    time.sleep(60)\n"
        "async def main():\n    server = Server(ServerConfig(bind='127.0.0.1:0'))\n"
        "    await lifecycle.serve([server], load, print, 5)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - began < 10

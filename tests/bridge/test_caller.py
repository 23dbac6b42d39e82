"""The caller's side against real bridges that go away, and against one that lies."""

import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from kakeya.bridge import caller
from kakeya.bridge.caller import Bridge, address_of
from kakeya.bridge.records import RunState
from kakeya.errors import (
    PresetNotFound,
    RemoteError,
    ResourceExhausted,
    RunNotFound,
    Unauthenticated,
    Unavailable,
)
from kakeya.serving.config import ServerConfig
from kakeya.serving.keys import hash_key
from kakeya.wire import bridge_pb2 as pb, bridge_pb2_grpc
from support.bridging import POLITE, bridging, running
from support.serving import free_port


@pytest.mark.parametrize(
    "given, address",
    [
        ("there", "there:50071"),
        ("there:1", "there:1"),
        ("10.0.0.7", "10.0.0.7:50071"),
        ("::1", "[::1]:50071"),
        ("[::1]", "[::1]:50071"),
        ("[::1]:5", "[::1]:5"),
    ],
)
def test_a_bridge_has_a_usual_port(given: str, address: str) -> None:
    assert address_of(given) == address


def test_a_run_is_followed_through_a_bridge_that_comes_back(tmp_path: Path) -> None:
    """The server goes and a new one listens on the same port, while the run goes on."""
    config, told = ServerConfig(bind=f"127.0.0.1:{free_port()}"), list[str]()
    with running(tmp_path, {"polite": POLITE}) as runs, Bridge(config.bind, tell=told.append) as bridge:
        with bridging(runs, config):
            (preset,) = bridge.presets()
            assert (preset.name, preset.arguments, preset.limit_s) == ("polite", ("--levels", "1"), 60.0)
            states = bridge.run("polite", "an-id")
            first = next(state for state in states if state.work)
        with bridging(runs, config):
            assert next(states).run_id == first.run_id
            (runs.directory / first.run_id / "go").touch()
            *_, last = states
            assert (last.state, last.has_report) == (RunState.PASSED, True)
            assert [each.run_id for each in bridge.runs()] == [first.run_id], "nothing was started twice"
            assert bridge.cancel(first.run_id) == last
            assert list(bridge.follow(first.run_id)) == [last]
            content = bridge.fetch(first.run_id)
            assert content == (runs.directory / first.run_id / "report.json").read_bytes()
            assert bridge.fetch(first.run_id, page=True) == b"<p>page"
    assert len(told) == 1
    assert "cannot be reached, trying again for 600 s" in told[0]


def test_refusals_are_the_errors_that_the_bridge_meant(tmp_path: Path) -> None:
    guarded = ServerConfig(bind="127.0.0.1:0", key_hashes=(hash_key("k"),))
    with running(tmp_path, {"polite": POLITE}) as runs, bridging(runs, guarded) as address:
        with Bridge(address, "wrong") as stranger, pytest.raises(Unauthenticated):
            stranger.presets()
        with Bridge(address, "k") as bridge:
            with pytest.raises(PresetNotFound, match="there are: polite"):
                next(bridge.run("nothing", ""))
            with pytest.raises(RunNotFound):
                bridge.fetch("nothing")
            with pytest.raises(RunNotFound):
                bridge.cancel("nothing")
            next(bridge.run("polite", "one"))
            with pytest.raises(ResourceExhausted, match="one run at a time"):
                next(bridge.run("polite", "two"))


def test_nobody_there_is_found_out_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller, "_FIRST_PATIENCE_S", 0.3)
    with Bridge(f"127.0.0.1:{free_port()}", patience_s=0.3) as bridge:
        for call in (lambda: next(bridge.run("a", "")), lambda: bridge.fetch("a")):
            with pytest.raises(Unavailable):
                call()


class Liar(bridge_pb2_grpc.BridgeServiceServicer):
    """Sends what it is given."""

    def __init__(self, messages: list[Any]) -> None:
        self._messages = messages

    def _say(self, request: Any, context: Any) -> Iterator[Any]:
        yield from self._messages

    FetchReport = RunPreset = FollowRun = _say  # type: ignore[assignment]

    @classmethod
    @contextmanager
    def called(cls, *messages: Any) -> Iterator[Bridge]:
        server = grpc.server(ThreadPoolExecutor(2))
        bridge_pb2_grpc.add_BridgeServiceServicer_to_server(cls(list(messages)), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with Bridge(f"127.0.0.1:{port}", patience_s=0.0) as bridge:
            yield bridge
        server.stop(None).wait()


def header(content: bytes, size: int | None = None) -> pb.ReportChunk:
    digest = hashlib.sha256(content).digest()
    return pb.ReportChunk(header=pb.ReportHeader(size=len(content) if size is None else size, sha256=digest))


def data(content: bytes) -> pb.ReportChunk:
    return pb.ReportChunk(data=content)


def test_a_report_is_what_its_digest_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with Liar.called(header(b"ab"), data(b"a"), data(b"b")) as bridge:
        assert bridge.fetch("x") == b"ab"
    for damaged in (
        [header(b"ab"), data(b"ax")],
        [header(b"ab"), data(b"a")],
        [],
        [data(b"ab")],
        [header(b"ab"), data(b"abc")],
    ):
        with Liar.called(*damaged) as bridge, pytest.raises(RemoteError):
            bridge.fetch("x")
    monkeypatch.setattr(caller, "LARGEST_REPORT", 1000)
    endless = [data(b"x" * 600)] * 3
    with (
        Liar.called(header(b"", 10**12), *endless) as bridge,
        pytest.raises(RemoteError, match="sends more than"),
    ):
        bridge.fetch("x")


@pytest.mark.parametrize(
    "state",
    [
        pb.RunStatus(preset="../../etc/cron", state=pb.RUN_STATE_PASSED),
        pb.RunStatus(preset="/etc/passwd", state=pb.RUN_STATE_PASSED),
        pb.RunStatus(preset="", state=pb.RUN_STATE_PASSED),
        pb.RunStatus(preset="fine", state=99),
        pb.RunStatus(preset="fine"),
    ],
)
def test_a_run_that_cannot_be_is_refused(state: pb.RunStatus) -> None:
    """The name of a preset becomes the name of a file."""
    with Liar.called(state) as bridge, pytest.raises(RemoteError, match="a run that cannot be"):
        next(bridge.follow("x"))


def test_a_stream_that_just_ends_is_a_break() -> None:
    running = pb.RunStatus(preset="fine", state=pb.RUN_STATE_RUNNING)
    with Liar.called(running) as bridge, pytest.raises(Unavailable, match="before the run had ended"):
        list(bridge.follow("x"))

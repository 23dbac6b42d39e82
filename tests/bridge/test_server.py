"""BridgeService over the wire: keys, health and the drain are those of every server."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kakeya.bridge.runs import Runs
from kakeya.bridge.server import BridgeServer
from kakeya.serving.config import ServerConfig
from kakeya.serving.keys import hash_key
from kakeya.wire import bridge_pb2 as pb, bridge_pb2_grpc
from support.bridging import POLITE, STUBBORN, bridging, running, until
from support.serving import ANY_PORT, channel_to, on_loop

Code = grpc.StatusCode
KEY = (("authorization", "Bearer the-key"),)
OTHER = (("authorization", "Bearer another-key"),)
GUARDED = ServerConfig(bind="127.0.0.1:0", key_hashes=(hash_key("the-key"), hash_key("another-key")))


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    with running(tmp_path, {"polite": POLITE, "stubborn": STUBBORN}, grace_s=0.2) as runs:
        yield runs


@pytest.fixture
def stub(runs: Runs) -> Iterator[Any]:
    with bridging(runs, GUARDED) as address, channel_to(address) as channel:
        yield bridge_pb2_grpc.BridgeServiceStub(channel)


def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as refusal:
        list(call())
    return refusal.value.code(), refusal.value.details()


def started(stub: Any, preset: str = "polite", **request: Any) -> tuple[Any, pb.RunStatus]:
    """The stream, and the first state that tells of work."""
    call = stub.RunPreset(pb.RunPresetRequest(preset=preset, **request), metadata=KEY)
    return call, next(state for state in call if state.work)


def test_a_run_from_its_start_to_its_report(stub: Any, runs: Runs) -> None:
    (listed, _) = stub.ListPresets(pb.ListPresetsRequest(), metadata=KEY).presets
    assert (listed.name, listed.benchmark, list(listed.arguments)) == (
        "polite",
        "capacity",
        ["--levels", "1"],
    )
    assert (listed.proves, listed.limit_seconds) == ("that it ends", 60.0)
    call, state = started(stub)
    assert (state.state, state.progress) == (pb.RUN_STATE_RUNNING, 0.25)
    (runs.directory / state.run_id / "go").touch()
    last = list(call)[-1]
    assert (last.state, last.progress, last.has_report) == (pb.RUN_STATE_PASSED, 1.0, True)
    (again,) = stub.FollowRun(pb.FollowRunRequest(run_id=state.run_id), metadata=KEY)
    (known,) = stub.ListRuns(pb.ListRunsRequest(), metadata=KEY).runs
    assert again == known == last
    request = pb.FetchReportRequest(run_id=state.run_id)
    header, *chunks = stub.FetchReport(request, metadata=KEY)
    content = b"".join(chunk.data for chunk in chunks)
    assert content == (runs.directory / state.run_id / "report.json").read_bytes()
    assert len(chunks) > 1
    assert (header.header.size, header.header.sha256) == (len(content), hashlib.sha256(content).digest())
    request.form = pb.REPORT_FORM_HTML
    assert [chunk.data for chunk in stub.FetchReport(request, metadata=KEY)][1:] == [b"<p>page"]


def test_a_lost_caller_does_not_end_a_run(stub: Any, runs: Runs) -> None:
    call, state = started(stub, request_id="mine")
    call.cancel()
    again, same = started(stub, request_id="mine")
    assert same.run_id == state.run_id
    again.cancel()
    until(lambda: not runs._listeners)
    assert stub.Cancel(pb.CancelRequest(run_id=state.run_id), metadata=KEY).state == pb.RUN_STATE_RUNNING
    *_, last = stub.FollowRun(pb.FollowRunRequest(run_id=state.run_id), metadata=KEY)
    assert (last.state, last.has_report) == (pb.RUN_STATE_CANCELLED, True)


def test_two_callers(stub: Any) -> None:
    call, state = started(stub)
    request = pb.RunPresetRequest(preset="stubborn")
    code, words = refused(lambda: stub.RunPreset(request, metadata=OTHER))
    assert code is Code.RESOURCE_EXHAUSTED
    assert "'polite' is going on" in words
    run_id = state.run_id
    for theirs in (
        lambda: stub.FollowRun(pb.FollowRunRequest(run_id=run_id), metadata=OTHER),
        lambda: stub.FetchReport(pb.FetchReportRequest(run_id=run_id), metadata=OTHER),
        lambda: [stub.Cancel(pb.CancelRequest(run_id=run_id), metadata=OTHER)],
    ):
        assert refused(theirs) == (Code.NOT_FOUND, f"there is no run '{run_id}'")
    assert not stub.ListRuns(pb.ListRunsRequest(), metadata=OTHER).runs
    call.cancel()


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer wrong"),)])
def test_every_call_needs_a_known_key(stub: Any, runs: Runs, metadata: Any) -> None:
    for call in (
        lambda: stub.ListPresets(pb.ListPresetsRequest(), metadata=metadata).presets,
        lambda: stub.RunPreset(pb.RunPresetRequest(preset="polite"), metadata=metadata),
        lambda: stub.FollowRun(pb.FollowRunRequest(), metadata=metadata),
        lambda: stub.ListRuns(pb.ListRunsRequest(), metadata=metadata).runs,
        lambda: stub.FetchReport(pb.FetchReportRequest(), metadata=metadata),
        lambda: [stub.Cancel(pb.CancelRequest(), metadata=metadata)],
    ):
        assert refused(call)[0] is Code.UNAUTHENTICATED
    assert not list(runs.directory.glob("*/")), "nothing was started"


def test_what_is_not_on_offer(stub: Any) -> None:
    for name in ("polite --help", "../polite", "pоlite", "", "polite\0"):
        code, _ = refused(lambda name=name: stub.RunPreset(pb.RunPresetRequest(preset=name), metadata=KEY))
        assert code is Code.NOT_FOUND
    assert {each.name for each in pb.RunPresetRequest.DESCRIPTOR.fields} == {"preset", "request_id"}
    call, state = started(stub)
    wrong = pb.FetchReportRequest(run_id=state.run_id, form=7)
    assert refused(lambda: stub.FetchReport(wrong, metadata=KEY))[0] is Code.INVALID_ARGUMENT
    early = pb.FetchReportRequest(run_id=state.run_id)
    assert refused(lambda: stub.FetchReport(early, metadata=KEY))[0] is Code.NOT_FOUND
    call.cancel()


def test_health_follows_its_life_and_a_drain_tells_who_follows(tmp_path: Path) -> None:
    async def listening() -> BridgeServer:
        server = BridgeServer(ANY_PORT)
        await server.start()
        return server

    server = on_loop(listening())
    server.interrupt()  # nothing runs yet
    with (
        running(tmp_path, {"stubborn": STUBBORN}, grace_s=60.0) as runs,
        channel_to(server.address) as channel,
    ):
        stub, health = bridge_pb2_grpc.BridgeServiceStub(channel), health_pb2_grpc.HealthStub(channel)

        def status() -> int:
            name = "kakeya.v1.BridgeService"
            return health.Check(health_pb2.HealthCheckRequest(service=name)).status

        assert status() == health_pb2.HealthCheckResponse.NOT_SERVING
        early = refused(lambda: stub.RunPreset(pb.RunPresetRequest(preset="stubborn")))
        assert early == (Code.UNAVAILABLE, "the bridge is still starting")
        on_loop(server.open(runs))
        assert status() == health_pb2.HealthCheckResponse.SERVING
        call = stub.RunPreset(pb.RunPresetRequest(preset="stubborn"))
        next(state for state in call if state.work)
        on_loop(server.refuse())
        assert status() == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not runs.drain(0.3)
        server.interrupt()
        *_, last = call
        assert (last.state, last.reason) == (pb.RUN_STATE_CANCELLED, "the bridge was shut down")
        late = refused(lambda: stub.RunPreset(pb.RunPresetRequest(preset="stubborn")))
        assert late[0] is Code.UNAVAILABLE
    on_loop(server.stop(0.2))

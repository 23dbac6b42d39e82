"""The gRPC server of a bridge: BridgeService, with keys, TLS, health and limits like every server of ours."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BufferedReader

from kakeya.bridge.archive import PAGE, REPORT
from kakeya.bridge.records import status_message
from kakeya.bridge.runs import Runs
from kakeya.errors import InvalidArgument, Unavailable
from kakeya.grpc_server.front import GrpcFront
from kakeya.grpc_server.status import Context, statuses
from kakeya.serving.config import ServerConfig
from kakeya.serving.keys import KeyRing
from kakeya.wire import bridge_pb2 as pb, bridge_pb2_grpc

CHUNK_BYTES = 256 * 1024
# Between two messages about a run, however often it says something.
_PACE_S = 0.1
_NAMES = {pb.REPORT_FORM_JSON: REPORT, pb.REPORT_FORM_HTML: PAGE}
_SERVICES = tuple(pb.DESCRIPTOR.services_by_name.values())


class BridgeService(bridge_pb2_grpc.BridgeServiceServicer):
    """Answers UNAVAILABLE until `runs` is set. Every call checks the key first."""

    def __init__(self, keys: KeyRing) -> None:
        self.runs: Runs | None = None
        self._keys = keys

    async def ListPresets(self, request: pb.ListPresetsRequest, context: Context) -> pb.ListPresetsResponse:
        async with self._called(context) as (runs, _):
            return pb.ListPresetsResponse(
                presets=[
                    pb.PresetInfo(
                        name=each.name,
                        proves=each.proves,
                        benchmark=each.benchmark,
                        arguments=each.arguments,
                        limit_seconds=each.limit_s,
                    )
                    for each in runs.presets.values()
                ]
            )

    async def RunPreset(self, request: pb.RunPresetRequest, context: Context) -> None:
        async with self._called(context) as (runs, owner):
            run_id = await asyncio.to_thread(runs.start, owner, request.preset, request.request_id)
            await _follow(runs, owner, run_id, context)

    async def FollowRun(self, request: pb.FollowRunRequest, context: Context) -> None:
        async with self._called(context) as (runs, owner):
            await _follow(runs, owner, request.run_id, context)

    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        async with self._called(context) as (runs, owner):
            return pb.ListRunsResponse(runs=map(status_message, runs.records(owner)))

    async def FetchReport(self, request: pb.FetchReportRequest, context: Context) -> None:
        async with self._called(context) as (runs, owner):
            if request.form not in _NAMES:
                raise InvalidArgument(f"there is no form {request.form} of a report")
            handle = runs.open_report(owner, request.run_id, _NAMES[request.form])
            with os.fdopen(handle, "rb") as file:
                await _send(file, context)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.RunStatus:
        async with self._called(context) as (runs, owner):
            return status_message(runs.cancel(owner, request.run_id))

    @asynccontextmanager
    async def _called(self, context: Context) -> AsyncIterator[tuple[Runs, str]]:
        async with statuses(context):
            owner = self._keys.owner_of(context.invocation_metadata() or ())
            if self.runs is None:
                raise Unavailable("the bridge is still starting")
            yield self.runs, owner


class BridgeServer(GrpcFront):
    """Use it from one event loop: `start`, `open` with the runs, `refuse`, `stop`."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config, [service.full_name for service in _SERVICES])
        self._service = BridgeService(KeyRing(config.key_hashes))
        bridge_pb2_grpc.add_BridgeServiceServicer_to_server(self._service, self._server)

    async def open(self, runs: Runs) -> None:
        """Serve from now on."""
        self._service.runs = runs
        await self._serving(runs.ended)

    def interrupt(self) -> None:
        """Kill the run, so that who follows it is told in time."""
        if self._service.runs is not None:
            self._service.runs.interrupt()


async def _follow(runs: Runs, owner: str, run_id: str, context: Context) -> None:
    """Write the run's state whenever it has changed, up to its end. Who leaves, leaves the run alone."""
    loop, changed = asyncio.get_running_loop(), asyncio.Event()
    with runs.listening(lambda: loop.call_soon_threadsafe(changed.set)):
        while True:
            changed.clear()
            record = runs.record(owner, run_id)
            await context.write(status_message(record))
            if record.is_over:
                return
            await changed.wait()
            await asyncio.sleep(_PACE_S)


async def _send(file: BufferedReader, context: Context) -> None:
    """The digest first: the file is read twice, since its bytes do not change, and may be many."""
    digest = await asyncio.to_thread(hashlib.file_digest, file, "sha256")
    header = pb.ReportHeader(size=file.tell(), sha256=digest.digest())
    await context.write(pb.ReportChunk(header=header))
    file.seek(0)
    while piece := await asyncio.to_thread(file.read, CHUNK_BYTES):
        await context.write(pb.ReportChunk(data=piece))

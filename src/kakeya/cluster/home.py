"""A home: a server with a fenced state directory, to which members of its cluster can move sessions.

It is the same server as one that stands alone. What it does beside: it tells how it is, hands sessions over,
takes sessions in, and ends as soon as another process has its directory.
"""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from kakeya.cluster.members import CHANNEL, FENCED_STATUS, Whereabouts, credentials
from kakeya.errors import Fenced, InvalidArgument, KakeyaError, Unavailable
from kakeya.grpc_server import Server
from kakeya.grpc_server.messages import session_info
from kakeya.grpc_server.status import Context, statuses
from kakeya.http_server.responses.documents import CONVERSATION, RESPONSE
from kakeya.serving.admission import Admission
from kakeya.serving.commons import Commons
from kakeya.serving.config import ServerConfig
from kakeya.serving.keys import check_front, hash_key
from kakeya.serving.workers import Workers
from kakeya.types import OwnerUsage
from kakeya.wire import cluster_pb2 as pb, cluster_pb2_grpc

if TYPE_CHECKING:  # torch takes a second to import, and the server listens before that
    from kakeya.runtime import Runtime

log = logging.getLogger(__name__)
_LOOK_AROUND_S = 0.5
_MOVE_TIMEOUT_S = 120.0
_ASK_TIMEOUT_S = 5.0
_PART_BYTES = 2**20
# The group's scaler looks so often.
_LATELY_S = 5.0


@dataclass(frozen=True)
class HomeConfig:
    """Who a home is in its cluster. `node` names its machine."""

    name: str
    secret: str = field(repr=False)
    node: str = ""
    labels: tuple[str, ...] = ()


class HomeService(cluster_pb2_grpc.HomeServiceServicer):
    """Answers UNAVAILABLE until `runtime` is set. Only members of the cluster may call."""

    def __init__(self, config: HomeConfig, admission: Admission) -> None:
        self.runtime: Runtime | None = None
        self.address = self.http_url = ""
        self._config = config
        self._secret_hash = hash_key(config.secret)
        # A home with many calls in hand must still show that it lives, whatever they wait for.
        self.looks, self._workers = Workers(2), Workers(8)
        self._admission = admission
        self._homes: dict[str, pb.Home] = {}
        self._list = ""
        self._spent: dict[tuple[str, int, str], int] = {}
        self._moving: set[str] = set()
        self._moved = Whereabouts()

    async def Beat(self, request: pb.BeatRequest, context: Context) -> pb.BeatResponse:
        async with self._called(context) as runtime:
            self._homes = {home.name: home for home in request.view.homes}
            self._list = request.view.list
            runtime.home.count_elsewhere(self._used_elsewhere())
            runtime.learn_proposers(request.view.proposers)
            return pb.BeatResponse(home=await self.looks.call(self._describe, runtime))

    async def GetView(self, request: pb.GetViewRequest, context: Context) -> pb.GetViewResponse:
        async with self._called(context) as runtime:
            me = await self.looks.call(self._describe, runtime)
            others = [home for name, home in self._homes.items() if name != me.name]
            return pb.GetViewResponse(view=pb.View(homes=[me, *others], list=self._list))

    async def ListMovable(self, request: pb.ListMovableRequest, context: Context) -> pb.ListMovableResponse:
        async with self._called(context) as runtime:
            found = await self._workers.call(runtime.home.movable)
            sessions = [pb.Movable(session_id=name, working=working) for name, working in found.items()]
            documents = await self._workers.call(_documents, runtime)
            return pb.ListMovableResponse(sessions=sessions, documents=documents)

    async def ListOwned(self, request: pb.ListOwnedRequest, context: Context) -> pb.ListOwnedResponse:
        async with self._called(context) as runtime:
            after = request.created_after, request.after_id
            found, has_more = await self._workers.call(
                runtime.home.by_age, request.owner, request.page_size, after
            )
            sessions = [
                pb.Owned(
                    created_at=at, session_id=each.session_id, info=session_info(each).SerializeToString()
                )
                for at, each in found
            ]
            return pb.ListOwnedResponse(sessions=sessions, has_more=has_more)

    async def MoveSession(self, request: pb.MoveSessionRequest, context: Context) -> pb.MoveSessionResponse:
        async with self._called(context) as runtime:
            size = await self._workers.call(self._hand_over, runtime, request)
            return pb.MoveSessionResponse(bytes=size)

    async def TakeIn(self, requests: AsyncIterator[pb.TakeInRequest], context: Context) -> pb.TakeInResponse:
        async with self._called(context) as runtime:
            file, longest = bytearray(), runtime.longest_import
            async for request in requests:
                file += request.data
                if len(file) > longest:
                    raise InvalidArgument(f"a session has at most {longest:,} bytes here, and more came")
            return pb.TakeInResponse(session_id=await self._workers.call(runtime.home.take_in, file))

    async def WasTaken(self, request: pb.WasTakenRequest, context: Context) -> pb.WasTakenResponse:
        async with self._called(context) as runtime:
            taken = await self._workers.call(runtime.home.was_taken, request.session_id, request.epoch)
            return pb.WasTakenResponse(taken=taken)

    async def FindSession(self, request: pb.FindSessionRequest, context: Context) -> pb.FindSessionResponse:
        async with self._called(context) as runtime:
            here = runtime.home.has_session(request.session_id)
            moved_to = "" if here else self._moved.get(request.session_id)
            return pb.FindSessionResponse(here=here, moved_to=moved_to)

    def close(self) -> None:
        """Take no more calls."""
        self.looks.close()
        self._workers.close()

    def settle_doubts(self, runtime: "Runtime") -> None:
        """Ask about sessions of which nobody knows whether they were taken. Runs on a worker."""
        for leaving in runtime.home.leaving():
            peer = self._homes.get(leaving.peer)
            if leaving.session_id in self._moving or peer is None:
                continue
            asked = pb.WasTakenRequest(session_id=leaving.session_id, epoch=leaving.epoch)
            try:
                with grpc.insecure_channel(peer.address, CHANNEL) as channel:
                    stub = cluster_pb2_grpc.HomeServiceStub(channel)
                    answer = stub.WasTaken(
                        asked, timeout=_ASK_TIMEOUT_S, metadata=credentials(self._config.secret)
                    )
            except grpc.RpcError as error:
                log.info("cannot ask %s about session %s: %s", peer.name, leaving.session_id, error)
                continue
            runtime.home.settle(leaving, taken=answer.taken)
            if answer.taken:
                self._moved.put(leaving.session_id, peer.name)

    def _hand_over(self, runtime: "Runtime", request: pb.MoveSessionRequest) -> int:
        """Runs on a worker, since it waits for the other home."""
        session_id = request.session_id

        def send(parts: Sequence[bytes | memoryview]) -> None:
            with grpc.insecure_channel(request.target_address, CHANNEL) as channel:
                stub = cluster_pb2_grpc.HomeServiceStub(channel)
                secret = credentials(self._config.secret)
                stub.TakeIn(_messages(parts), timeout=_MOVE_TIMEOUT_S, metadata=secret)

        self._moving.add(session_id)
        try:
            size = runtime.home.hand_over(session_id, request.target, send)
        except grpc.RpcError as error:
            raise Unavailable(f"{request.target} has not said that it took the session: {error}") from error
        finally:
            self._moving.discard(session_id)
        self._moved.put(session_id, request.target)
        return size

    def _used_elsewhere(self) -> Mapping[str, OwnerUsage]:
        """What owners use at the other homes; tokens are those spent since the last time."""
        sessions, requests, tokens = Counter[str](), Counter[str](), Counter[str]()
        spent: dict[tuple[str, int, str], int] = {}
        for home in self._homes.values():
            if home.name == self._config.name:
                continue
            for owner, used in home.usage.items():
                key = (home.name, home.epoch, owner)
                spent[key] = used.tokens
                sessions[owner] += used.sessions
                requests[owner] += used.requests
                tokens[owner] += used.tokens - self._spent.get(key, used.tokens if not self._spent else 0)
        self._spent = spent
        return {owner: OwnerUsage(sessions[owner], requests[owner], tokens[owner]) for owner in sessions}

    def _describe(self, runtime: "Runtime") -> pb.Home:
        facts, config = runtime.describe(), self._config
        known = self._homes.get(config.name)
        sessions, held = runtime.home.count_sessions()
        state = runtime.settings.state
        asleep = 0 if state is None else state.disk_tier_bytes // max(1, facts.session_bytes)
        usage = {
            owner: pb.OwnerUsage(sessions=used.sessions, requests=used.requests, tokens=used.tokens)
            for owner, used in runtime.home.usage().items()
        }
        return pb.Home(
            name=config.name,
            address=self.address,
            http_url=self.http_url,
            epoch=runtime.home.epoch,
            node=config.node,
            model=facts.model,
            slabs=facts.capacity,
            free_slabs=runtime.free_slabs,
            most_sessions=min(2**31, facts.capacity + asleep),
            sessions=sessions,
            running=self._admission.running,
            waiting=self._admission.waiting,
            labels=config.labels,
            draining=known is not None and known.draining,
            usage=usage,
            held_sessions=held,
            session_bytes=facts.session_bytes,
            shape=runtime.shape,
            queue_seconds=max(self._admission.longest_wait_s, runtime.recent_queue_seconds(_LATELY_S)),
        )

    @asynccontextmanager
    async def _called(self, context: Context) -> AsyncIterator["Runtime"]:
        async with statuses(context):
            check_front(dict(context.invocation_metadata() or ()), self._secret_hash)
            if self.runtime is None:
                raise Unavailable("the home is still loading")
            yield self.runtime


class HomeServer(Server):
    """A gRPC server that is a home of a cluster. `when_fenced` is called when another process has become that
    home: by default this one then ends."""

    def __init__(
        self,
        config: ServerConfig,
        commons: Commons,
        home: HomeConfig,
        when_fenced: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(config, commons)
        self._when_fenced = when_fenced or leave_at_once
        self.home = HomeService(home, commons.admission)
        cluster_pb2_grpc.add_HomeServiceServicer_to_server(self.home, self._server)
        self._looking: asyncio.Task[None] | None = None

    async def open(self, runtime: "Runtime") -> None:
        """Serve from now on, until another process has the directory."""
        self.home.address = self.address
        await super().open(runtime)
        self.home.runtime = runtime
        self._looking = asyncio.create_task(self._look_around(runtime), name="kakeya-home")

    async def stop(self, grace_s: float) -> None:
        if self._looking is not None:
            self._looking.cancel()
        await super().stop(grace_s)
        self.home.close()

    async def _look_around(self, runtime: "Runtime") -> None:
        """End when somebody else is this home; learn what became of sessions that were being sent."""
        while True:
            try:
                await self.home.looks.call(runtime.home.check)
                await self.home.looks.call(self.home.settle_doubts, runtime)
            except Fenced as error:
                self._when_fenced(str(error))
                return
            except KakeyaError as error:
                log.warning("the state directory cannot be looked at: %s", error)
            await asyncio.sleep(_LOOK_AROUND_S)


def _documents(runtime: "Runtime") -> int:
    return sum(len(runtime.documents(kind)) for kind in (RESPONSE, CONVERSATION))


def leave_at_once(reason: str) -> None:
    """Somebody else has the sessions: nothing that this process says is true any more."""
    log.error("this process is not the home any more and ends: %s", reason)
    logging.shutdown()
    os._exit(FENCED_STATUS)


def _messages(parts: Sequence[bytes | memoryview]) -> Iterator[pb.TakeInRequest]:
    for each in parts:
        part = memoryview(each)
        for start in range(0, len(part), _PART_BYTES):
            yield pb.TakeInRequest(data=bytes(part[start : start + _PART_BYTES]))

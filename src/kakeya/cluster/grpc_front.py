"""RuntimeService for a whole cluster: each call goes to the home that has the session, as it came.

Of a request only the session's id is read, and of an answer nothing. Lists are put together from all homes.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc.aio import AioRpcError

from kakeya.cluster.homes import Homes, Link, came_through
from kakeya.dialing import MODEL_KEY
from kakeya.errors import ERROR_NAME_KEY, InvalidArgument, Restarting, Unavailable
from kakeya.grpc_server.front import GrpcFront
from kakeya.grpc_server.server import SERVICE_NAME
from kakeya.grpc_server.status import Context, statuses
from kakeya.serving.config import ServerConfig
from kakeya.serving.keys import KeyRing
from kakeya.wire import cluster_pb2, runtime_pb2 as pb

_MOST_HOPS = 8
_PAGE_SIZE = 100

# How a home says that it has no room for one session more.
_FULL = ("NoFreeSlab", "StorageFailed")

# The classes of gRPC are generic for the type checker alone.
Handler = Any

# Calls about one session, which is the first field of their requests; the last two are answered by a stream.
_OF_A_SESSION = ("AppendTokens", "RecallTokens", "GetSessionInfo", "CloseSession")
_STREAMED = ("Generate", "ExportSession")


class Forwarding(grpc.GenericRpcHandler):
    """Answers every call of RuntimeService. Every call checks the key first."""

    def __init__(self, keys: KeyRing) -> None:
        self.homes: Homes | None = None
        self._keys = keys
        self._is_draining = False
        self._handlers = {
            **{name: _unary(self._to_session(name)) for name in _OF_A_SESSION},
            **{name: grpc.unary_stream_rpc_method_handler(self._stream_of(name)) for name in _STREAMED},
            "ForkSession": _unary(self._fork),
            "CreateSession": _unary(self._create),
            "ImportSession": grpc.stream_unary_rpc_method_handler(self._import),
            "ListSessions": _unary(self._list),
            "GetServerInfo": _unary(self._server_info),
            "GetTokenizer": _unary(self._tokenizer),
        }

    def service(self, details: grpc.HandlerCallDetails) -> Handler | None:
        service, _, method = details.method.lstrip("/").partition("/")
        return self._handlers.get(method) if service == SERVICE_NAME else None

    def refuse(self) -> None:
        """Tell new calls to go elsewhere; those that run go on."""
        self._is_draining = True

    # The calls.

    def _to_session(self, method: str) -> Callable[[bytes, Context], Awaitable[bytes | None]]:
        async def call(request: bytes, context: Context) -> bytes | None:
            return await self._answer(request, context, method)

        return call

    async def _answer(self, request: bytes, context: Context, method: str) -> bytes | None:
        async with _answering(context):
            owner, homes = self._called(context)
            return (await self._followed(homes, method, request, owner, context))[0]

    async def _followed(
        self, homes: Homes, method: str, request: bytes, owner: str, context: Context
    ) -> tuple[bytes, Link]:
        """The answer of the home that has the session, wherever it went, and that home. Raises _Refused."""
        session_id = session_in(request)
        name = await homes.home_of(session_id)
        for _ in range(_MOST_HOPS):
            link = await homes.reach(name)
            try:
                return await self._unary(link, method, request, owner, context), link
            except AioRpcError as error:
                moved = await self._moved_to(homes, link, session_id, error)
                if not moved:
                    raise _Refused(link, error) from error
                name = moved
        raise Unavailable(f"session {session_id!r} moves too often: try again later")

    async def _fork(self, request: bytes, context: Context) -> bytes | None:
        """Where the session is, or, where that home is full, at the nearest one with room."""
        async with _answering(context):
            owner, homes = self._called(context)
            asked = pb.ForkSessionRequest.FromString(request)
            known = homes.made_at(owner, asked.request_id)
            target = await homes.reach(known) if known else None
            if target is None:
                try:
                    return (await self._followed(homes, "ForkSession", request, owner, context))[0]
                except _Refused as refused:
                    if error_name(refused.error) in _FULL:
                        target = await homes.reach_beside(refused.link.name, owner, asked.request_id)
                    if target is None:
                        raise
            return await self._copied(homes, asked, target, owner, context)

    async def _copied(
        self, homes: Homes, asked: pb.ForkSessionRequest, target: Link, owner: str, context: Context
    ) -> bytes:
        """A fork at another home: the state travels through here, as in an export and an import."""
        session = pb.GetSessionInfoRequest(session_id=asked.session_id).SerializeToString()
        told, source = await self._followed(homes, "GetSessionInfo", session, owner, context)
        label = pb.GetSessionInfoResponse.FromString(told).client_label
        metadata, left = homes.credentials(owner), context.time_remaining()
        export = source.channel.unary_stream(_path("ExportSession"))(session, metadata=metadata, timeout=left)
        broken: list[AioRpcError] = []

        async def messages() -> AsyncIterator[bytes]:
            try:
                async for message in export:
                    part = pb.StatePart.FromString(message).data
                    sent = pb.ImportSessionRequest(data=part, client_label=label, request_id=asked.request_id)
                    yield sent.SerializeToString()
            except AioRpcError as error:  # what came so far is refused there, since it is not whole
                broken.append(error)

        bring_in = target.channel.stream_unary(_path("ImportSession"))
        try:
            answer = await bring_in(messages(), metadata=metadata, timeout=left)
        except AioRpcError as error:
            raise _Refused(source if broken else target, (*broken, error)[0]) from error
        made = pb.ImportSessionResponse.FromString(answer)
        fork = pb.ForkSessionResponse(session_id=made.session_id, history_length=made.history_length)
        return fork.SerializeToString()

    def _stream_of(self, method: str) -> Callable[[bytes, Context], Awaitable[None]]:
        async def call(request: bytes, context: Context) -> None:
            await self._stream(request, context, method)

        return call

    async def _stream(self, request: bytes, context: Context, method: str) -> None:
        """Every message of the home is written as it comes. However the call ends, so does the home's."""
        async with statuses(context):
            owner, homes = self._called(context)
            session_id = session_in(request)
            name = await homes.home_of(session_id)
            for _ in range(_MOST_HOPS):
                link, began = await homes.reach(name), False
                call = link.channel.unary_stream(_path(method))(
                    request, metadata=homes.credentials(owner), timeout=context.time_remaining()
                )
                try:
                    async for message in call:
                        began = True
                        await context.write(message)
                    return
                except AioRpcError as error:
                    moved = "" if began else await self._moved_to(homes, link, session_id, error)
                    if began and not came_through(error):
                        homes.broke(link)
                    if not moved:
                        await _abort(context, error)
                    name = moved
                finally:
                    call.cancel()
            raise Unavailable(f"session {session_id!r} moves too often: try again later")

    async def _create(self, request: bytes, context: Context) -> bytes | None:
        async with statuses(context):
            owner, homes = self._called(context)
            request_id = pb.CreateSessionRequest.FromString(request).request_id
            link = await homes.reach_for_new(owner, _model(context, homes), request_id)
            return await self._passed(homes, link, "CreateSession", request, owner, context)

    async def _import(self, requests: AsyncIterator[bytes], context: Context) -> bytes | None:
        async with statuses(context):
            owner, homes = self._called(context)
            parts = aiter(requests)
            first = await anext(parts, b"")
            request_id = pb.ImportSessionRequest.FromString(first).request_id
            link = await homes.reach_for_new(owner, _model(context, homes), request_id)

            async def messages() -> AsyncIterator[bytes]:
                yield first
                async for part in parts:
                    yield part

            call = link.channel.stream_unary(_path("ImportSession"))
            try:
                answer: bytes = await call(
                    messages(), metadata=homes.credentials(owner), timeout=context.time_remaining()
                )
                return answer
            except AioRpcError as error:
                return await self._failed(homes, link, error, context)

    async def _list(self, request: bytes, context: Context) -> bytes | None:
        """The oldest first, wherever they are. A page's token is the age of its last session, which no move
        changes."""
        async with _answering(context):
            owner, homes = self._called(context)
            asked = pb.ListSessionsRequest.FromString(request)
            size, (created_after, after_id) = asked.page_size or _PAGE_SIZE, _age_in(asked.page_token)
            wanted = cluster_pb2.ListOwnedRequest(
                owner=owner, page_size=size, created_after=created_after, after_id=after_id
            )
            found = await asyncio.gather(*(self._owned(homes, name, wanted) for name in homes.homes))
            # One that moved in this moment may be told of twice.
            every = {each.session_id: each for listed in found for each in listed.sessions}
            in_order = sorted(every.values(), key=lambda each: (each.created_at, each.session_id))
            has_more = len(in_order) > size or any(listed.has_more for listed in found)
            return pb.ListSessionsResponse(
                sessions=[pb.GetSessionInfoResponse.FromString(each.info) for each in in_order[:size]],
                next_page_token=_token_of(in_order[size - 1]) if has_more else "",
            ).SerializeToString()

    async def _owned(
        self, homes: Homes, name: str, wanted: cluster_pb2.ListOwnedRequest
    ) -> cluster_pb2.ListOwnedResponse:
        link = await homes.reach(name)
        try:
            found: cluster_pb2.ListOwnedResponse = await link.stub.ListOwned(
                wanted, metadata=homes.credentials(wanted.owner)
            )
            return found
        except AioRpcError as error:
            if not came_through(error):
                homes.broke(link)
            raise _Refused(link, error) from error

    async def _server_info(self, request: bytes, context: Context) -> bytes | None:
        """What one home says, with the sessions of all that have its model."""
        async with statuses(context):
            owner, homes = self._called(context)
            alike = homes.serving(_model(context, homes))
            link = await self._first_reached(homes, [home.name for home in alike])
            answer = await self._passed(homes, link, "GetServerInfo", request, owner, context)
            info = pb.GetServerInfoResponse.FromString(answer or b"")
            info.capacity = sum(home.slabs for home in alike)
            info.features.append("cluster")
            return info.SerializeToString()

    async def _tokenizer(self, request: bytes, context: Context) -> bytes | None:
        async with statuses(context):
            owner, homes = self._called(context)
            alike = homes.serving(_model(context, homes))
            link = await self._first_reached(homes, [home.name for home in alike])
            return await self._passed(homes, link, "GetTokenizer", request, owner, context)

    # Behind them.

    def _called(self, context: Context) -> tuple[str, Homes]:
        owner = self._keys.owner_of(context.invocation_metadata() or ())
        if self._is_draining:
            raise Restarting("this front end is shutting down and takes no new work")
        if self.homes is None:
            raise Restarting("the front end is still looking for the homes of the cluster")
        return owner, self.homes

    async def _unary(self, link: Link, method: str, request: bytes, owner: str, context: Context) -> bytes:
        assert self.homes is not None
        call = link.channel.unary_unary(_path(method))
        answer: bytes = await call(
            request, metadata=self.homes.credentials(owner), timeout=context.time_remaining()
        )
        return answer

    async def _passed(
        self, homes: Homes, link: Link, method: str, request: bytes, owner: str, context: Context
    ) -> bytes | None:
        """The home's answer. Its refusal is passed on as well."""
        try:
            return await self._unary(link, method, request, owner, context)
        except AioRpcError as error:
            return await self._failed(homes, link, error, context)

    async def _failed(self, homes: Homes, link: Link, error: AioRpcError, context: Context) -> bytes | None:
        if not came_through(error):
            homes.broke(link)
        await _abort(context, error)
        return None

    async def _moved_to(self, homes: Homes, link: Link, session_id: str, error: AioRpcError) -> str:
        """Where to try next, after this error; empty where the caller is to have it."""
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return await homes.locate(session_id, link.name)
        if not came_through(error):
            homes.broke(link)
        return ""

    async def _first_reached(self, homes: Homes, names: list[str]) -> Link:
        """Any of these homes, one that was heard of first."""
        return await homes.reach(min(names, key=lambda name: (homes.homes[name].silent, name)))


class _Refused(Exception):
    """What a home said instead of an answer."""

    def __init__(self, link: Link, error: AioRpcError) -> None:
        super().__init__(error.details())
        self.link, self.error = link, error


@asynccontextmanager
async def _answering(context: Context) -> AsyncIterator[None]:
    """What is raised inside becomes the status of the call, also what a home has said."""
    async with statuses(context):
        try:
            yield
        except _Refused as refused:
            await _abort(context, refused.error)


class ClusterServer(GrpcFront):
    """The gRPC server of a front end: `start`, `open` with the homes, `refuse`, `stop`."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(config, (SERVICE_NAME,))
        self._forwarding = Forwarding(KeyRing(config.key_hashes))
        self._server.add_generic_rpc_handlers((self._forwarding,))

    async def open(self, homes: Homes) -> None:
        """Serve from now on."""
        await homes.open()
        self._forwarding.homes = homes
        await self._serving(homes.ended)

    async def refuse(self) -> None:
        self._forwarding.refuse()
        await super().refuse()

    def interrupt(self) -> None:
        """Calls end with their connections."""

    async def stop(self, grace_s: float) -> None:
        """Stop listening; calls that still run get the grace."""
        await super().stop(grace_s)
        if self._forwarding.homes is not None:
            await self._forwarding.homes.end()


def session_in(request: bytes) -> str:
    """The session that a request is about: the first field of all that are."""
    return pb.GetSessionInfoRequest.FromString(request).session_id


def _token_of(last: cluster_pb2.Owned) -> str:
    return f"{last.created_at.hex()}:{last.session_id}"


def _age_in(token: str) -> tuple[float, str]:
    """When the last session of a page was created, and its id. Raises InvalidArgument."""
    if not token:
        return -1.0, ""
    created_at, _, session_id = token.partition(":")
    try:
        return float.fromhex(created_at), session_id
    except (ValueError, OverflowError):
        raise InvalidArgument("page_token must be one that came with an earlier page") from None


def _model(context: Context, homes: Homes) -> str:
    given = dict(context.invocation_metadata() or ()).get(MODEL_KEY)
    return str(given) if given else homes.default_model


def _path(method: str) -> str:
    return f"/{SERVICE_NAME}/{method}"


def _unary(call: Callable[[bytes, Context], Any]) -> Handler:
    return grpc.unary_unary_rpc_method_handler(call)


def error_name(error: AioRpcError) -> str:
    """The class of the error at the home; empty where the home has not answered."""
    return next((str(value) for key, value in error.trailing_metadata() or () if key == ERROR_NAME_KEY), "")


async def _abort(context: Context, error: AioRpcError) -> None:
    """Tell the caller what the home said, or that it said nothing."""
    if came_through(error):
        named = tuple((key, value) for key, value in error.trailing_metadata() or () if key == ERROR_NAME_KEY)
        await context.abort(error.code(), error.details() or "", named)
    elif error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        await context.abort(error.code(), error.details() or "")
    await context.abort(
        grpc.StatusCode.UNAVAILABLE,
        "the home of the session broke off: its sessions go on when it is back",
        ((ERROR_NAME_KEY, "Unavailable"),),
    )

"""A gRPC proxy that loses replies on request: what a broken network does, at an exact moment."""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from kakeya.errors import ERROR_NAME_KEY
from kakeya.wire import runtime_pb2 as pb, runtime_pb2_grpc


@dataclass(frozen=True)
class Refuse:
    """Answer with a status; the server never hears of the call."""

    code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE
    details: str = "refused by the test"
    error_name: str = ""


@dataclass(frozen=True)
class LoseReply:
    """Let the server act, and lose its answer."""


@dataclass(frozen=True)
class BreakStream:
    """Pass on the first tokens, take `lost` more events from the server, then break both connections."""

    passed: int
    lost: int = 1


@dataclass(frozen=True)
class EndStream:
    """Pass on the first tokens, then end as if all were well."""

    passed: int


@dataclass(frozen=True)
class Hang:
    """Never answer."""


Fault = Refuse | LoseReply | BreakStream | EndStream | Hang


class FaultyProxy(runtime_pb2_grpc.RuntimeServiceServicer):
    """Stands between a client and a real server. `calls` is what came through, in order."""

    def __init__(self, target: str, credentials: grpc.ServerCredentials | None = None) -> None:
        self._target = target
        self._credentials = credentials
        self._faults: dict[str, deque[Fault | None]] = defaultdict(deque)
        self.calls: list[tuple[str, Any]] = []
        self.address = ""

    def plan(self, method: str, *faults: Fault | None) -> None:
        """What happens to the next calls of a method, one fault each; None lets one pass."""
        self._faults[method].extend(faults)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._target)
        self._stub = runtime_pb2_grpc.RuntimeServiceStub(self._channel)
        self._server = grpc.aio.server()
        runtime_pb2_grpc.add_RuntimeServiceServicer_to_server(self, self._server)
        if self._credentials is None:
            port = self._server.add_insecure_port("127.0.0.1:0")
        else:
            port = self._server.add_secure_port("127.0.0.1:0", self._credentials)
        self.address = f"localhost:{port}" if self._credentials else f"127.0.0.1:{port}"
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(None)
        await self._channel.close()

    def _arrived(self, name: str, request: Any) -> Fault | None:
        copy = type(request)()
        copy.CopyFrom(request)
        self.calls.append((name, copy))
        faults = self._faults[name]
        return faults.popleft() if faults else None

    async def _pass(self, name: str, request: Any, context: Any) -> Any:
        fault = self._arrived(name, request)
        if isinstance(fault, Refuse):
            await _refuse(context, fault)
        if isinstance(fault, Hang):
            await asyncio.Event().wait()
        try:
            reply = await getattr(self._stub, name)(request, metadata=_key(context))
        except grpc.aio.AioRpcError as error:
            await _pass_on(context, error)
        if isinstance(fault, LoseReply):
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the reply was lost")
        return reply

    async def Generate(  # noqa: N802 - the name on the wire
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateEvent]:
        fault = self._arrived("Generate", request)
        if isinstance(fault, Refuse):
            await _refuse(context, fault)
        if fault is not None:
            request.group_tokens = False  # so that it can strike at any token
        call = self._stub.Generate(request, metadata=_key(context))
        passed = lost = 0
        try:
            async for event in call:
                if isinstance(fault, BreakStream) and passed == fault.passed:
                    lost += 1
                    if lost == fault.lost:
                        call.cancel()
                        await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
                    continue
                if isinstance(fault, EndStream) and passed == fault.passed:
                    return
                passed += event.HasField("token")
                yield event
        except grpc.aio.AioRpcError as error:
            await _pass_on(context, error)
        finally:
            call.cancel()


def _passing(name: str) -> Callable[[FaultyProxy, Any, Any], Awaitable[Any]]:
    async def method(self: FaultyProxy, request: Any, context: Any) -> Any:
        return await self._pass(name, request, context)

    return method


for _name in (
    "CreateSession",
    "AppendTokens",
    "GetSessionInfo",
    "CloseSession",
    "ForkSession",
    "ListSessions",
    "GetServerInfo",
    "GetTokenizer",
):
    setattr(FaultyProxy, _name, _passing(_name))


def _key(context: Any) -> tuple[tuple[str, str], ...]:
    return tuple((key, value) for key, value in context.invocation_metadata() if key == "authorization")


async def _refuse(context: Any, fault: Refuse) -> None:
    named = ((ERROR_NAME_KEY, fault.error_name),) if fault.error_name else ()
    await context.abort(fault.code, fault.details, named)


async def _pass_on(context: Any, error: grpc.aio.AioRpcError) -> None:
    named = tuple((key, value) for key, value in error.trailing_metadata() if key == ERROR_NAME_KEY)
    await context.abort(error.code(), error.details(), named)

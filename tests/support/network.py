"""What lies between a client and a server: proxies that break at an exact moment, and certificates."""

import asyncio
import datetime
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kakeya.dialing import MODEL_KEY
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
class Alter:
    """Pass the reply on with these fields changed."""

    fields: Mapping[str, Any]


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


Fault = Refuse | LoseReply | Alter | BreakStream | EndStream | Hang


class FaultyProxy(runtime_pb2_grpc.RuntimeServiceServicer):
    """A gRPC proxy that loses what it is told to lose.

    `calls` is what came through, in order, and `models` the models that those calls named.
    """

    def __init__(self, target: str, credentials: grpc.ServerCredentials | None = None) -> None:
        self._target = target
        self._credentials = credentials
        self._faults: dict[str, deque[Fault | None]] = defaultdict(deque)
        self.calls: list[tuple[str, Any]] = []
        self.models: list[str | None] = []
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

    def _arrived(self, name: str, request: Any, context: Any) -> Fault | None:
        copy = type(request)()
        copy.CopyFrom(request)
        self.calls.append((name, copy))
        self.models.append(dict(context.invocation_metadata()).get(MODEL_KEY))
        faults = self._faults[name]
        return faults.popleft() if faults else None

    async def _pass(self, name: str, request: Any, context: Any) -> Any:
        fault = self._arrived(name, request, context)
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
        if isinstance(fault, Alter):
            for name, value in fault.fields.items():
                setattr(reply, name, value)
        return reply

    async def Generate(  # noqa: N802 - the name on the wire
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateEvent]:
        fault = self._arrived("Generate", request, context)
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
    "RecallTokens",
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


class CutLine:
    """A TCP line that forwards bytes both ways until `cut`; new connections go through again.

    With `cut_after` the first connection is cut when this many bytes have come from the server.
    """

    def __init__(self, target: str, cut_after: int | None = None) -> None:
        self._cut_after = cut_after
        host, port = target.rsplit(":", 1)
        self._host, self._port = host, int(port)
        self._open: set[asyncio.StreamWriter] = set()
        self.connections = 0
        self.address = ""

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self.cut()
        await asyncio.sleep(0)

    def cut(self) -> None:
        """Break every connection at once, without a goodbye."""
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._open |= {writer, far_writer}
        limit, self._cut_after = self._cut_after, None
        await asyncio.gather(_forward(reader, far_writer), _forward(far_reader, writer, limit))


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None = None
) -> None:
    passed = 0
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
            passed += len(data)
            if limit is not None and passed >= limit:
                writer.transport.abort()
    except OSError:
        pass  # the line was cut
    finally:
        writer.close()


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, as PEM files."""

    cert: Path
    key: Path
    certificate: x509.Certificate
    private_key: ec.EllipticCurvePrivateKey


def issue(directory: Path, name: str, authority: Issued | None = None) -> Issued:
    """A certificate for 127.0.0.1 and localhost; an authority of its own when none is given."""
    private_key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(authority.certificate.subject if authority else subject)
        .public_key(private_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .add_extension(names, critical=False)
        .sign(authority.private_key if authority else private_key, hashes.SHA256())
    )
    cert, key = directory / f"{name}.pem", directory / f"{name}.key"
    cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key.write_bytes(
        private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return Issued(cert, key, certificate, private_key)


@dataclass(frozen=True)
class Papers:
    """An authority, what it issued, and a stranger's."""

    authority: Issued
    server: Issued
    client: Issued
    stranger: Issued

    @classmethod
    def make(cls, directory: Path) -> Self:
        authority, other = issue(directory, "authority"), issue(directory, "other-authority")
        return cls(
            authority,
            issue(directory, "server", authority),
            issue(directory, "client", authority),
            issue(directory, "stranger", other),
        )

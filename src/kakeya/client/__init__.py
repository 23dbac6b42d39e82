"""The Python SDK: sessions on a Kakeya server, asynchronous and plain. Never imports torch.

Errors are those of `kakeya.errors`, a class for each row of the wire contract, with the gRPC status.
"""

from kakeya.client.asynchronous import AsyncClient
from kakeya.client.session import AsyncSession
from kakeya.client.settings import GenerateOptions
from kakeya.client.stream import AsyncStream
from kakeya.client.synchronous import Client, Session, Stream
from kakeya.client.values import GenerateResult, ServerInfo, SessionInfo, Token, TokenLogprob
from kakeya.dialing import TLS, Keepalive, Retry
from kakeya.types import StopReason, TokenRange

__all__ = [
    "TLS",
    "AsyncClient",
    "AsyncSession",
    "AsyncStream",
    "Client",
    "GenerateOptions",
    "GenerateResult",
    "Keepalive",
    "Retry",
    "ServerInfo",
    "Session",
    "SessionInfo",
    "StopReason",
    "Stream",
    "Token",
    "TokenLogprob",
    "TokenRange",
]

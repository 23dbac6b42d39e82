"""Keys, owners, TLS."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kakeya.errors import ConfigError
from kakeya.grpc_server import Server
from kakeya.serving.config import ServerConfig, TlsConfig
from kakeya.serving.keys import hash_key
from kakeya.wire import runtime_pb2 as pb
from support import serving
from support.network import Issued, Papers
from support.serving import new_session

Code = grpc.StatusCode
ALICE, BOB = "alice-key-0123456789", "bob-key-0123456789"


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


@pytest.fixture(scope="module")
def guarded(model: Path) -> Iterator[Server]:
    config = ServerConfig(bind="127.0.0.1:0", key_hashes=(hash_key(ALICE), hash_key(BOB)))
    with serving.serving(model, config) as (server, _):
        yield server


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        bearer("alice"),
        bearer(""),
        bearer(ALICE + "x"),
        (("authorization", ALICE),),
        (("authorization", f"Basic {ALICE}"),),
        (("x-api-key", ALICE),),
    ],
)
def test_every_call_needs_a_known_key(guarded: Server, metadata: Any) -> None:
    with serving.connected(guarded.address) as stub:
        calls = [
            (stub.CreateSession, pb.CreateSessionRequest()),
            (stub.AppendTokens, pb.AppendTokensRequest()),
            (stub.Generate, pb.GenerateRequest()),
            (stub.GetSessionInfo, pb.GetSessionInfoRequest()),
            (stub.CloseSession, pb.CloseSessionRequest()),
            (stub.ForkSession, pb.ForkSessionRequest()),
            (stub.ListSessions, pb.ListSessionsRequest()),
            (stub.GetServerInfo, pb.GetServerInfoRequest()),
            (stub.GetTokenizer, pb.GetTokenizerRequest()),
        ]
        for method, request in calls:
            with pytest.raises(grpc.RpcError) as refused:
                answer = method(request, metadata=metadata)
                list(answer)
            assert refused.value.code() is Code.UNAUTHENTICATED
            assert dict(refused.value.trailing_metadata())["kakeya-error"] == "Unauthenticated"


def test_a_session_is_invisible_to_other_owners(guarded: Server) -> None:
    with serving.connected(guarded.address) as stub:
        session_id = new_session(stub, [5, 6], metadata=bearer(ALICE))
        for method, request in (
            (stub.AppendTokens, pb.AppendTokensRequest(session_id=session_id, token_ids=[1])),
            (stub.Generate, pb.GenerateRequest(session_id=session_id, max_tokens=1)),
            (stub.GetSessionInfo, pb.GetSessionInfoRequest(session_id=session_id)),
            (stub.CloseSession, pb.CloseSessionRequest(session_id=session_id)),
            (stub.ForkSession, pb.ForkSessionRequest(session_id=session_id)),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                list(method(request, metadata=bearer(BOB)))
            # The very words for a session that never was.
            assert (refused.value.code(), refused.value.details()) == (
                Code.NOT_FOUND,
                f"no session {session_id!r}",
            )
        listing = pb.ListSessionsRequest()
        assert len(stub.ListSessions(listing, metadata=bearer(BOB)).sessions) == 0
        (mine,) = stub.ListSessions(listing, metadata=bearer(ALICE)).sessions
        assert mine.history_length == 2


def test_health_needs_no_key(guarded: Server) -> None:
    with serving.channel_to(guarded.address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_keys_are_never_logged(guarded: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), serving.connected(guarded.address) as stub:
        new_session(stub, [5], metadata=bearer(ALICE))
        with pytest.raises(grpc.RpcError):
            new_session(stub, metadata=bearer("a-wrong-key"))
    for secret in (ALICE, "a-wrong-key", hash_key(ALICE).hex()):
        assert secret not in caplog.text
    assert ALICE not in repr(ServerConfig(key_hashes=(hash_key(ALICE),)))
    assert repr(hash_key(ALICE)) not in repr(ServerConfig(key_hashes=(hash_key(ALICE),)))


# TLS, with certificates made here.


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers.make(tmp_path_factory.mktemp("papers"))


def credentials(authority: Issued, client: Issued | None = None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        authority.cert.read_bytes(),
        client.key.read_bytes() if client else None,
        client.cert.read_bytes() if client else None,
    )


def server_says(server: Server, channel_credentials: grpc.ChannelCredentials | None) -> str | grpc.StatusCode:
    address = f"localhost:{server.address.rpartition(':')[2]}"
    with serving.connected(address, channel_credentials) as stub:
        try:
            return stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=5).version
        except grpc.RpcError as refused:
            return refused.code()


def test_tls_proves_the_server(model: Path, papers: Papers) -> None:
    config = ServerConfig(bind="127.0.0.1:0", tls=TlsConfig(papers.server.cert, papers.server.key))
    with serving.serving(model, config) as (server, _):
        assert server_says(server, credentials(papers.authority)) == "0.1.0"
        assert server_says(server, credentials(papers.stranger)) is Code.UNAVAILABLE
        assert server_says(server, None) is Code.UNAVAILABLE


def test_mutual_tls_proves_the_client_too(model: Path, papers: Papers) -> None:
    tls = TlsConfig(papers.server.cert, papers.server.key, papers.authority.cert)
    with serving.serving(model, ServerConfig(bind="127.0.0.1:0", tls=tls)) as (server, _):
        assert server_says(server, credentials(papers.authority, papers.client)) == "0.1.0"
        assert server_says(server, credentials(papers.authority)) is Code.UNAVAILABLE
        assert server_says(server, credentials(papers.authority, papers.stranger)) is Code.UNAVAILABLE


def test_papers_that_do_not_fit_are_found_before_listening(papers: Papers, tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("not a certificate")
    missing = tmp_path / "missing.pem"
    for tls, words in (
        (TlsConfig(papers.server.cert, papers.client.key), "server.pem"),
        (TlsConfig(garbage, papers.server.key), "garbage.pem"),
        (TlsConfig(missing, papers.server.key), "missing.pem"),
        (TlsConfig(papers.server.cert, papers.server.key, garbage), "client authority"),
        (TlsConfig(papers.server.cert, papers.server.key, missing), "client authority"),
    ):
        with pytest.raises(ConfigError, match=words):
            serving.start(ServerConfig(bind="127.0.0.1:0", tls=tls))

"""Settings of the client: retries, keepalive, and TLS with certificates made here."""

import asyncio
from pathlib import Path

import grpc
import pytest

from kakeya.client import TLS, AsyncClient, Keepalive, Retry
from kakeya.dialing import channel_options
from kakeya.errors import ConfigError, Unavailable
from support.network import FaultyProxy, issue
from support.serving import CAPACITY, KEY


@pytest.mark.parametrize(
    "settings", [{"attempts": 0}, {"first_delay": 0.0}, {"first_delay": 2.0, "longest_delay": 1.0}]
)
def test_bad_retries_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="Retry"):
        Retry(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"interval": 0.0}, {"timeout": -1.0}])
def test_bad_keepalives_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="Keepalive"):
        Keepalive(**settings)


def test_keepalive_reaches_the_channel() -> None:
    options = dict(channel_options(Retry(), Keepalive(interval=7, timeout=2.5)))
    assert options["grpc.keepalive_time_ms"] == 7000
    assert options["grpc.keepalive_timeout_ms"] == 2500


async def capacity_over(server: str, credentials: grpc.ServerCredentials, tls: TLS | None) -> int:
    async with (
        FaultyProxy(server, credentials) as proxy,
        AsyncClient(proxy.address, api_key=KEY, tls=tls, retry=Retry(attempts=1), timeout=10) as client,
    ):
        return (await client.server_info()).capacity


def test_tls_checks_the_server(server: str, tmp_path: Path) -> None:
    own, other = issue(tmp_path, "server"), issue(tmp_path, "other")
    credentials = grpc.ssl_server_credentials([(own.key.read_bytes(), own.cert.read_bytes())])
    assert asyncio.run(capacity_over(server, credentials, TLS(ca_file=own.cert))) == CAPACITY
    for tls in (TLS(ca_file=other.cert), None):
        with pytest.raises(Unavailable):
            asyncio.run(capacity_over(server, credentials, tls))


def test_mutual_tls_checks_the_client(server: str, tmp_path: Path) -> None:
    own, client = issue(tmp_path, "server"), issue(tmp_path, "client")
    credentials = grpc.ssl_server_credentials(
        [(own.key.read_bytes(), own.cert.read_bytes())], client.cert.read_bytes(), require_client_auth=True
    )
    known = TLS(ca_file=str(own.cert), cert_file=client.cert, key_file=client.key)
    assert asyncio.run(capacity_over(server, credentials, known)) == CAPACITY
    with pytest.raises(Unavailable):
        asyncio.run(capacity_over(server, credentials, TLS(ca_file=own.cert)))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        AsyncClient(tls=TLS(ca_file=tmp_path / "nowhere.pem"))
    with pytest.raises(ConfigError, match="together"):
        TLS(cert_file=tmp_path / "alone.pem")


@pytest.mark.parametrize("model", ["", "größe", "a\nb"])
def test_a_model_that_cannot_be_a_name(model: str) -> None:
    with pytest.raises(ConfigError, match="model must be printable ASCII"):
        AsyncClient(model=model)

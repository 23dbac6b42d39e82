"""TLS and mutual TLS, with certificates made here."""

import asyncio
import datetime
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from kakeya.client import TLS, AsyncClient, Retry
from kakeya.errors import ConfigError, Unavailable
from support.faulty_proxy import FaultyProxy
from support.served import KEY

NO_RETRY = Retry(attempts=1)


def certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A certificate for localhost that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = directory / f"{name}.crt", directory / f"{name}.key"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    return cert_file, key_file


async def capacity_over(server: str, credentials: grpc.ServerCredentials, tls: TLS | None) -> int:
    async with (
        FaultyProxy(server, credentials) as proxy,
        AsyncClient(proxy.address, api_key=KEY, tls=tls, retry=NO_RETRY, timeout=10) as client,
    ):
        return (await client.server_info()).capacity


def test_tls_checks_the_server(server: str, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    other, _ = certificate(tmp_path, "other")
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), cert.read_bytes())])
    assert asyncio.run(capacity_over(server, credentials, TLS(ca_file=cert))) == 6
    for tls in (TLS(ca_file=other), None):
        with pytest.raises(Unavailable):
            asyncio.run(capacity_over(server, credentials, tls))


def test_mutual_tls_checks_the_client(server: str, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "server")
    own, own_key = certificate(tmp_path, "client")
    credentials = grpc.ssl_server_credentials(
        [(key.read_bytes(), cert.read_bytes())], own.read_bytes(), require_client_auth=True
    )
    known = TLS(ca_file=str(cert), cert_file=own, key_file=own_key)
    assert asyncio.run(capacity_over(server, credentials, known)) == 6
    with pytest.raises(Unavailable):
        asyncio.run(capacity_over(server, credentials, TLS(ca_file=cert)))


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        AsyncClient(tls=TLS(ca_file=tmp_path / "nowhere.pem"))
    with pytest.raises(ConfigError, match="together"):
        TLS(cert_file=tmp_path / "alone.pem")

"""Certificates for tests of TLS, made on the spot."""

import datetime
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


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

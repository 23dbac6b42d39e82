"""Encryption at rest: AES-256-GCM with a key from a file. Without one, what is stored is stored as it is."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from kakeya.errors import ConfigError, StateDamaged

_NONCE = 12
_LEAST_KEY = 16


class Sealer:
    """Stores bytes as they are. What they belong to, `context`, is not checked."""

    name = "plain"

    def seal(self, contents: bytes | memoryview, context: str) -> bytes | memoryview:
        return contents

    def seal_parts(self, parts: Sequence[bytes | memoryview], context: str) -> Sequence[bytes | memoryview]:
        """The same for contents in parts, which need not be put together for it."""
        return parts

    def open(self, sealed: bytes | bytearray | memoryview, context: str) -> bytes | bytearray | memoryview:
        """The contents. Raises StateDamaged when they are not what was sealed under this context."""
        return sealed


class AesSealer(Sealer):
    """Encrypts and authenticates: bytes moved to another place, changed or cut are refused."""

    def __init__(self, secret: bytes) -> None:
        # Imported here because it takes a while, and only those who encrypt need it.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        key = hashlib.sha256(b"kakeya state\0" + secret).digest()
        self.name = "aes-256-gcm:" + hashlib.sha256(b"kakeya key name\0" + key).hexdigest()[:16]
        self._cipher = AESGCM(key)

    def seal(self, contents: bytes | memoryview, context: str) -> bytes:
        nonce = os.urandom(_NONCE)
        return nonce + self._cipher.encrypt(nonce, contents, context.encode())

    def seal_parts(self, parts: Sequence[bytes | memoryview], context: str) -> Sequence[bytes | memoryview]:
        return [self.seal(b"".join(parts), context)]

    def open(self, sealed: bytes | bytearray | memoryview, context: str) -> bytes:
        from cryptography.exceptions import InvalidTag

        view = memoryview(sealed)
        try:
            return self._cipher.decrypt(view[:_NONCE], view[_NONCE:], context.encode())
        except (InvalidTag, ValueError) as error:
            raise StateDamaged(f"{context} was changed, or was encrypted with another key") from error


def open_sealer(key_file: Path | None) -> Sealer:
    """The sealer for a key file; one that does nothing without. Raises ConfigError for a bad key file."""
    if key_file is None:
        return Sealer()
    try:
        secret = key_file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"the key file {key_file} cannot be read: {error}") from error
    if len(secret) < _LEAST_KEY:
        raise ConfigError(f"the key file {key_file} must hold at least {_LEAST_KEY} bytes, got {len(secret)}")
    return AesSealer(secret)

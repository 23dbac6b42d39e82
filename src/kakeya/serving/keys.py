"""API keys: each is an owner. Only their SHA-256 digests are kept, and none is ever logged."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from kakeya.errors import ConfigError, Unauthenticated

# The caller's name when the server has no keys.
OPEN_OWNER = "local"

# Metadata and headers by which a front end of a cluster says in whose name it calls, and that it may.
OWNER_KEY, SECRET_KEY = "kakeya-owner", "kakeya-cluster-secret"

_SCHEME = "Bearer "


def hash_key(key: str) -> bytes:
    """The digest that stands for a key. Raises ConfigError for one that no client could send."""
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError("an API key must be printable ASCII without spaces, and not empty")
    return hashlib.sha256(key.encode()).digest()


def owner_name(key_hash: bytes) -> str:
    """The owner that a key stands for: safe to log, since neither key nor digest follows from it."""
    return "key-" + hashlib.sha256(b"kakeya owner\0" + key_hash).hexdigest()[:16]


class KeyRing:
    """Tells who calls from the metadata of a call: `authorization: Bearer KEY`.

    With a `front_hash` it believes the front ends of a cluster, which checked the key, and nobody else.
    """

    def __init__(self, key_hashes: Iterable[bytes], front_hash: bytes | None = None) -> None:
        self._owners = [(key_hash, owner_name(key_hash)) for key_hash in key_hashes]
        self._front_hash = front_hash

    def owner_of(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        """The caller's name. Raises Unauthenticated for a missing or unknown key.

        Every known key is compared, in constant time, whichever of them matches.
        """
        if self._front_hash is not None:
            return self._named_owner(dict(metadata), self._front_hash)
        if not self._owners:
            return OPEN_OWNER
        presented = hashlib.sha256(_bearer(metadata)).digest()
        caller = None
        for key_hash, owner in self._owners:
            if hmac.compare_digest(key_hash, presented):
                caller = owner
        if caller is None:
            # Clients of OpenAI's API know a wrong key by these first words.
            raise Unauthenticated("Incorrect API key provided, or none: send `authorization: Bearer KEY`")
        return caller

    def _named_owner(self, metadata: Mapping[str, str | bytes], front_hash: bytes) -> str:
        check_front(metadata, front_hash)
        return str(metadata.get(OWNER_KEY, ""))


def check_front(metadata: Mapping[str, str | bytes], front_hash: bytes) -> None:
    """Raises Unauthenticated unless a member of the cluster calls."""
    shown = hashlib.sha256(str(metadata.get(SECRET_KEY, "")).encode()).digest()
    if not hmac.compare_digest(front_hash, shown):
        raise Unauthenticated("this is a home in a cluster: call one of the cluster's front ends")


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    for name, value in metadata:
        text = value.decode("latin-1") if isinstance(value, bytes) else value
        if name == "authorization" and text.startswith(_SCHEME):
            return text.removeprefix(_SCHEME).encode()
    return b""

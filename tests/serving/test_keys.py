"""Keys and the owners that they stand for."""

import hashlib

import pytest

from kakeya.errors import ConfigError, Unauthenticated
from kakeya.serving.keys import OPEN_OWNER, KeyRing, hash_key, owner_name

ALICE, BOB = "alice-key-0123456789", "bob-key-0123456789"


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),)


def test_an_owner_follows_from_the_key_but_not_back() -> None:
    ring = KeyRing([hash_key(ALICE), hash_key(BOB)])
    alice, bob = ring.owner_of(bearer(ALICE)), ring.owner_of(bearer(BOB))
    assert alice == owner_name(hashlib.sha256(ALICE.encode()).digest()) != bob
    assert KeyRing([hash_key(ALICE)]).owner_of(bearer(ALICE)) == alice
    assert ring.owner_of([("authorization", b"Bearer " + BOB.encode())]) == bob
    assert hash_key(ALICE).hex()[:16] not in alice
    with pytest.raises(Unauthenticated):
        ring.owner_of(bearer("nobody"))


def test_without_keys_everybody_is_one_owner() -> None:
    assert KeyRing([]).owner_of(()) == KeyRing([]).owner_of(bearer("any")) == OPEN_OWNER


@pytest.mark.parametrize("key", ["", "two words", "schlüssel", "tab\tkey", "line\n"])
def test_a_key_that_no_client_could_send_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="printable ASCII") as refused:
        hash_key(key)
    assert not key or key not in str(refused.value)

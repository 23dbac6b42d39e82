"""The session store: unguessable ids, owners kept apart."""

import pytest

from kakeya.config import CacheConfig
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.slab import SlabGeometry, SlabPool
from kakeya.errors import SessionNotFound
from kakeya.sessions.store import SessionStore
from kakeya.types import DType


@pytest.fixture
def pool() -> SlabPool:
    return SlabPool(SlabGeometry(1, 1, 2, CacheConfig(1, 2, 1), DType.FLOAT32), 8)


def sequence(pool: SlabPool, owner: str) -> TokenSequence:
    return TokenSequence(pool.allocate(), owner, (), None)


def test_ids_are_long_and_never_the_same(pool: SlabPool) -> None:
    store = SessionStore()
    ids = {store.add(sequence(pool, "a"), "").session_id for _ in range(8)}
    assert len(ids) == 8
    assert all(len(session_id) >= 32 for session_id in ids)


def test_a_session_is_its_owners_alone(pool: SlabPool) -> None:
    store = SessionStore()
    session = store.add(sequence(pool, "a"), "label")
    store.add(sequence(pool, "b"), "")
    assert store.get(session.session_id, "a") is session
    assert store.owned_by("a") == [session]
    with pytest.raises(SessionNotFound):
        store.get(session.session_id, "b")
    store.remove(session)
    store.remove(session)
    with pytest.raises(SessionNotFound):
        store.get(session.session_id, "a")


def test_the_idle_clock_starts_again_with_use(pool: SlabPool) -> None:
    session = SessionStore().add(sequence(pool, "a"), "")
    session.last_used_at -= 100
    assert session.describe().idle_seconds >= 100
    session.touch()
    assert session.describe().idle_seconds < 50


def test_states_have_names(pool: SlabPool) -> None:
    session = SessionStore().add(sequence(pool, "a"), "")
    assert session.describe().state == "idle"
    session.sequence.error = ValueError()
    assert session.describe().state == "failed"

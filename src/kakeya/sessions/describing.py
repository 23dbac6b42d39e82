"""Descriptions of sessions, taken at one moment of the engine."""

from collections.abc import Iterable, Sequence

from kakeya.engine.engine import Engine
from kakeya.engine.sequence import TokenSequence
from kakeya.sessions.session import Session
from kakeya.types import SessionInfo


def describe_all(engine: Engine, sessions: Sequence[Session]) -> list[tuple[Session, SessionInfo]]:
    """Sessions with what they hold; those that were closed meanwhile are left out."""
    if not sessions:
        return []

    def describe() -> list[tuple[Session, SessionInfo]]:
        return [(each, each.describe()) for each in sessions if not each.is_closed]

    return engine.read_all(awake(sessions), describe)


def awake(sessions: Iterable[Session]) -> list[TokenSequence]:
    """The sequences of those that have one."""
    return [sequence for each in sessions if (sequence := each.sequence) is not None]

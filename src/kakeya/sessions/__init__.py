"""Who holds which conversation: sessions, the store that keeps them and the desk in front of it."""

from kakeya.sessions.desk import SessionDesk
from kakeya.sessions.session import Session
from kakeya.sessions.store import SessionStore
from kakeya.sessions.sweep import Sweeper

__all__ = ["Session", "SessionDesk", "SessionStore", "Sweeper"]

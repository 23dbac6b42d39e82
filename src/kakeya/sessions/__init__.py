"""Who holds which conversation: sessions, the store that keeps them, and what owners may use."""

from kakeya.sessions.session import Session
from kakeya.sessions.store import SessionStore
from kakeya.sessions.sweep import Sweeper

__all__ = ["Session", "SessionStore", "Sweeper"]

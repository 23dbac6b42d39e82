"""Who holds which conversation: sessions and the store that keeps them."""

from kakeya.sessions.session import Session
from kakeya.sessions.store import SessionStore

__all__ = ["Session", "SessionStore"]

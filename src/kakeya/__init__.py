"""Kakeya: a session-bound, memory-bounded inference runtime for language models."""

__version__ = "0.1.0"

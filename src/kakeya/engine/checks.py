"""What callers hand to the engine, checked before anything changes."""

from collections.abc import Iterable

from kakeya.errors import InvalidArgument


def check_tokens(token_ids: Iterable[object], vocab_size: int) -> None:
    """Raises InvalidArgument for the first that is no token id."""
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise InvalidArgument(f"token id {token!r} is not in the vocabulary of {vocab_size} tokens")


def check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"{name} must be a whole number of at least 1, got {value!r}")

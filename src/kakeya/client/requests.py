"""Requests of the wire, from what a caller gives. A value that does not fit its field is refused by name."""

import secrets
from typing import Any, TypeVar

from google.protobuf.message import Message

from kakeya.errors import InvalidArgument

M = TypeVar("M", bound=Message)


def new_request_id() -> str:
    return secrets.token_hex(16)


def build(kind: type[M], **fields: Any) -> M:
    """A message with these fields; None leaves one unset. Raises InvalidArgument naming the first bad one."""
    message = kind()
    for name, value in fields.items():
        if value is None:
            continue
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(f"{name} cannot be {repr(value)[:60]}: {error}") from None
    return message

"""Page tokens: where the next page of a listing begins, in a form that promises nothing."""

import base64
import binascii

from kakeya.errors import InvalidArgument

MAX_PAGE_SIZE = 1000
_PREFIX = "after:"


def check_page_size(size: object) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_PAGE_SIZE:
        raise InvalidArgument(f"page_size must be a whole number from 1 to {MAX_PAGE_SIZE}, got {size!r}")


def page_token(last_number: int) -> str:
    """The token of the page after the session with this number."""
    return base64.urlsafe_b64encode(f"{_PREFIX}{last_number}".encode()).decode()


def last_number(token: str) -> int:
    """The number a token was made from; 0, before all sessions, for the empty one."""
    if not token:
        return 0
    try:
        text = base64.b64decode(token, altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        text = ""
    number = text.removeprefix(_PREFIX)
    if not text.startswith(_PREFIX) or not number.isdigit():
        raise InvalidArgument("page_token must be one that came with an earlier page")
    return int(number)

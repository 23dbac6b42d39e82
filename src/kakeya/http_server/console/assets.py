"""The console's files, as they are sent: read once, with headers that let nothing foreign in."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

PAGE = "index.html"

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Besides the page's own files nothing is loaded, run, framed or sent anywhere, and text cannot become markup.
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # Kept by browsers, and asked about each time: a new release shows at once.
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True)
class Asset:
    """One file and how it is sent."""

    content: bytes
    media_type: str
    headers: Mapping[str, str]


@cache
def assets() -> Mapping[str, Asset]:
    """Every file of the console by its name."""
    found = {}
    for file in files(__package__).iterdir():
        suffix = file.name[file.name.rfind(".") :]
        if suffix in _TYPES:
            content = file.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found[file.name] = Asset(content, _TYPES[suffix], _HEADERS | {"ETag": tag})
    return found

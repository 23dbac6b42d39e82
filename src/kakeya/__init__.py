"""Kakeya: a session-bound, memory-bounded inference runtime for language models."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kakeya.client import AsyncClient, Client

__version__ = "0.1.0"
__all__ = ["AsyncClient", "Client", "__version__"]


def __getattr__(name: str) -> Any:
    # The client brings gRPC with it; whoever wants only a leaf or the command line does not wait for that.
    if name in ("AsyncClient", "Client"):
        from kakeya import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

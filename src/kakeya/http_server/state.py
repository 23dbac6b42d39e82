"""What the routes of one HTTP server share from its start, whether a model is loaded or not."""

from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from kakeya.errors import Unavailable
from kakeya.serving.commons import Commons
from kakeya.serving.config import HttpConfig
from kakeya.serving.keys import KeyRing
from kakeya.serving.reader import EventSource
from kakeya.serving.workers import Workers

if TYPE_CHECKING:  # torch takes a second to import, and the server listens before that
    from kakeya.http_server.loaded import Loaded
    from kakeya.metrics import Metrics
    from kakeya.runtime import Runtime


class HttpState:
    """One per server, at `app.state.kakeya`. Used from one event loop. `loaded` comes with the model.

    `streams` holds every generate that runs, so that a shutdown can end it; after `interrupted` is set, a
    generate that ends CANCELLED was ended by us, and its client is to be told Unavailable. Streams that
    are sent as they come share the `pace`.
    """

    def __init__(self, config: HttpConfig, commons: Commons, metrics: "Metrics | None" = None) -> None:
        self.config = config
        self.keys = KeyRing(config.key_hashes, config.front_hash)
        self.workers = Workers()
        self.admission, self.pace, self.eviction = commons.admission, commons.pace, commons.eviction
        self.metrics = metrics
        self.loaded: Loaded | None = None
        self.streams: set[EventSource] = set()
        self.is_draining = False
        self.interrupted = False

    def require_loaded(self) -> "Loaded":
        """What came with the model, also while it drains. Raises Unavailable before it is loaded."""
        if self.loaded is None:
            raise Unavailable("the model is still loading")
        return self.loaded

    def require_ready(self) -> "Loaded":
        """What came with the model, for new work. Raises Unavailable before it is loaded, once the server
        drains, and when the engine is dead."""
        loaded = self.require_loaded()
        self.check_takes_work(loaded.runtime)
        return loaded

    def check_takes_work(self, runtime: "Runtime") -> None:
        """Raises Unavailable once the server drains, and when the engine is dead."""
        runtime.check_alive()
        if self.is_draining:
            raise Unavailable("the server is shutting down and takes no new work")

    def interrupt(self) -> None:
        """End every generate now; its client is told Unavailable."""
        self.interrupted = True
        for stream in tuple(self.streams):
            stream.cancel()


def state_of(request: Request) -> HttpState:
    """The state of the server that got this request."""
    state = request.app.state.kakeya
    assert isinstance(state, HttpState)
    return state


State = Annotated[HttpState, Depends(state_of)]

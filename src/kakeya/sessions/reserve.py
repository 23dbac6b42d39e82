"""Room that is made before it is needed, on a thread of its own."""

import logging
import threading
from collections.abc import Callable

from kakeya.errors import KakeyaError

log = logging.getLogger(__name__)


class Reserve:
    """Calls `make_room` after each `look`. Several looks while it works are one. Safe from any thread."""

    def __init__(self, make_room: Callable[[], object]) -> None:
        self._make_room = make_room
        self._changed = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._live, name="kakeya-reserve", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()

    def look(self) -> None:
        """Room may be needed. Does not wait."""
        self._changed.set()

    def stop(self) -> None:
        """Finish what is being done, and end. Idempotent."""
        self._stopping = True
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _live(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            if self._stopping:
                return
            try:
                self._make_room()
            except KakeyaError as error:  # whoever needs the room is told the same
                log.warning("no slab is kept in reserve: %s", error)
            except Exception:
                log.exception("no slab is kept in reserve")

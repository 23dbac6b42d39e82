"""The thread that closes idle sessions."""

import logging
import threading
from collections.abc import Callable

from kakeya.errors import Unavailable

log = logging.getLogger(__name__)
LONGEST_PERIOD_S = 30.0


class Sweeper:
    """Calls `sweep` a few times within each `ttl`, from `start` until `stop` or until the engine is gone."""

    def __init__(self, sweep: Callable[[], object], ttl: float) -> None:
        self._sweep = sweep
        self._period = min(ttl / 4, LONGEST_PERIOD_S)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kakeya-sweep", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()

    def stop(self) -> None:
        """Stop and wait for the thread. Idempotent."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._period):
            try:
                self._sweep()
            except Unavailable:
                return
            except Exception:
                log.exception("closing idle sessions failed; it is tried again later")

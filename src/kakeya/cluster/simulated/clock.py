"""Virtual time: what is due next happens next."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any


class Clock:
    """Events in the order of their times; those of one moment in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = count()

    def after(self, seconds: float, act: Callable[..., None], *arguments: object) -> None:
        """Have something happen so many seconds from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), act, arguments))

    def run(self, until: float) -> None:
        """Let everything happen that is due by then."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, act, arguments = heapq.heappop(events)
            act(*arguments)
        self.now = until

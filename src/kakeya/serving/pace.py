"""How often a stream is sent what waits for it.

A message costs about the same whether it carries one token or eight, on both ends, and where client, server
and engine share the cores it is the engine that pays. So streams share a budget of messages a second: one
stream is sent every token as it comes; many get several tokens at a time, and the engine keeps its cores.
"""

from collections.abc import Iterator
from contextlib import contextmanager

MESSAGES_PER_SECOND = 150
# So that many streams look as smooth as one: about what a step may take while prompts are read.
LONGEST_PAUSE_S = 0.04


class Pace:
    """Counts the streams of one process. Used from one event loop."""

    def __init__(
        self, messages_per_second: float = MESSAGES_PER_SECOND, longest_pause_s: float = LONGEST_PAUSE_S
    ) -> None:
        self._messages_per_second = messages_per_second
        self._longest_pause_s = longest_pause_s
        self._streams = 0

    def rests_until(self, now: float) -> float:
        """When a stream that was sent something at `now` may be sent the next message.

        The same moment for all of them: what they then have to do finds the caches warm.
        """
        pause = min((self._streams - 1) / self._messages_per_second, self._longest_pause_s)
        return (now // pause + 1) * pause if pause > 0 else now

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Counts one more stream while it lasts."""
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

"""How many rows of prompts go into a step beside streams, from what rows have cost so far."""

from kakeya.engine.blend import blend

_LEAST_ROWS = 8
_ALONE = 2  # times the limit for steps of prompts alone: whoever comes next waits for them


class StallLimit:
    """Keeps the steps that streams wait for within `limit_seconds`; 0 is no limit.

    Where the streams alone take as long, prompts add half of that: they must get on as well.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._streams_seconds = 0.0
        self._row_seconds = 0.0

    def learn(self, prompt_rows: int, seconds: float, *, has_streams: bool) -> None:
        """A step has taken so long."""
        if not prompt_rows:
            self._streams_seconds = blend(self._streams_seconds, seconds)
            return
        alone = self._streams_seconds if has_streams else 0.0
        self._row_seconds = blend(self._row_seconds, max(seconds - alone, 0.0) / prompt_rows)

    def rows(self, most: int, *, is_awaited: bool = True) -> int:
        """Rows of prompts in a step, at most `most`. `is_awaited`: somebody gets a token by it."""
        if not self._limit or not self._row_seconds:
            return most
        beside = max(self._limit - self._streams_seconds, self._streams_seconds / 2)
        seconds = beside if is_awaited else _ALONE * self._limit
        return max(min(_LEAST_ROWS, most), min(most, int(seconds / self._row_seconds)))

"""How many rows of prompts go into a step beside streams, from what rows have cost so far."""

from kakeya.engine.blend import blend

_LEAST_ROWS = 8
_ALONE = 2  # times the limit for steps of prompts alone: whoever comes next waits for them
_SURPRISE = 1.5  # times what was expected: a step that took longer than that counts as that long
_KEPT = 0.99  # of what is known of slots after each step: the last hundred count


class StallLimit:
    """Keeps the steps that streams wait for within `limit_seconds`; 0 is no limit.

    A row of a prompt costs something by itself and something for each slot that it sees. Where the streams
    alone take as long as the limit, prompts add half of that: they must get on as well.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._streams_seconds = 0.0
        self._row_seconds = 0.0  # of a row that sees nothing
        self._slots = _SlotPrice()

    def learn(self, rows: int, seen: int, seconds: float, *, has_streams: bool) -> None:
        """A step with so many rows of prompts, which see so many slots in all, has taken so long."""
        if not rows:
            self._streams_seconds = blend(self._streams_seconds, seconds)
            return
        alone = self._streams_seconds if has_streams else 0.0
        taken = max(seconds - alone, 0.0)
        if self._row_seconds:
            taken = min(taken, _SURPRISE * self._row_seconds * (rows + self._slots.price * seen))
        self._slots.learn(rows, seen, taken)
        self._row_seconds = blend(self._row_seconds, taken / (rows + self._slots.price * seen))

    def rows(self, most: int, seen: int, *, is_awaited: bool = True) -> int:
        """Rows of prompts in a step, at most `most`, where the next one sees so many slots.

        `is_awaited`: somebody gets a token by the step.
        """
        if not self._limit or not self._row_seconds:
            return most
        beside = max(self._limit - self._streams_seconds, self._streams_seconds / 2)
        seconds = beside if is_awaited else _ALONE * self._limit
        row_seconds = self._row_seconds * (1 + self._slots.price * seen)
        return max(min(_LEAST_ROWS, most), min(most, int(seconds / row_seconds)))


class _SlotPrice:
    """What a row pays for each slot that it sees, in rows that see nothing: least squares over many steps."""

    def __init__(self) -> None:
        self.price = 0.0
        self._rows_rows = self._rows_seen = self._seen_seen = self._rows_taken = self._seen_taken = 0.0

    def learn(self, rows: int, seen: int, taken: float) -> None:
        self._rows_rows = _KEPT * self._rows_rows + rows * rows
        self._rows_seen = _KEPT * self._rows_seen + rows * seen
        self._seen_seen = _KEPT * self._seen_seen + seen * seen
        self._rows_taken = _KEPT * self._rows_taken + rows * taken
        self._seen_taken = _KEPT * self._seen_taken + seen * taken
        # Steps whose rows all see alike do not tell one price from the other: what was learned before stays.
        independent = self._rows_rows * self._seen_seen - self._rows_seen**2
        if independent <= 0.01 * self._rows_rows * self._seen_seen:
            return
        row = self._seen_seen * self._rows_taken - self._rows_seen * self._seen_taken
        slot = self._rows_rows * self._seen_taken - self._rows_seen * self._rows_taken
        if row > 0.0:
            self.price = max(slot, 0.0) / row

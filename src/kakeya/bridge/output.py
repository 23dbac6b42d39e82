"""What a run writes: its latest progress and the last of its other lines are kept, and nothing else."""

import json
import math
from collections import deque

LONGEST_LINE = 4096
LONGEST_WORK = 200
TAIL_BYTES = 16 * 1024


class Output:
    """Takes the bytes of a run as they come. `total` counts all of them."""

    def __init__(self) -> None:
        self.progress, self.work = 0.0, ""
        self.total = 0
        self._line = b""
        self._tail: deque[bytes] = deque()
        self._kept = 0

    def feed(self, piece: bytes) -> bool:
        """Whether the progress has changed."""
        self.total += len(piece)
        before = (self.progress, self.work)
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            self._hear(line)
        while len(self._line) > LONGEST_LINE:  # no end of the line in sight
            self._keep(self._line[:LONGEST_LINE])
            self._line = self._line[LONGEST_LINE:]
        return (self.progress, self.work) != before

    def tail(self) -> str:
        """The last lines that were no progress, whole characters only."""
        return b"\n".join([*self._tail, *([self._line] if self._line else [])]).decode("utf-8", "replace")

    def last_words(self) -> str:
        """The last line; one of ours if there is any, which others may have been put after."""
        lines = [line for line in self.tail().splitlines() if line.strip()]
        own = [line for line in lines if line.startswith("kakeya: ")]
        return (own or lines or ["it said nothing"])[-1]

    def _hear(self, line: bytes) -> None:
        told = _progress(line)
        if told is None:
            self._keep(line[:LONGEST_LINE])
        else:
            self.progress, self.work = told

    def _keep(self, line: bytes) -> None:
        self._tail.append(line)
        self._kept += len(line) + 1
        while self._kept > TAIL_BYTES:
            self._kept -= len(self._tail.popleft()) + 1


def _progress(line: bytes) -> tuple[float, str] | None:
    """What a line of `--progress json` says; None for any other line."""
    if not line.startswith(b'{"progress": ') or len(line) > LONGEST_LINE:
        return None
    try:
        told = json.loads(line)
        done, work = float(told["progress"]), str(told["work"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return (min(1.0, max(0.0, done)), work[:LONGEST_WORK]) if math.isfinite(done) else None

"""The shapes that steps are padded to, so that few are compiled."""

from dataclasses import dataclass


@dataclass(frozen=True)
class GroupShape:
    """Sessions with equally many rows each, computed together. All that a compiled step depends on.

    The rows of a session come in pieces: each is written to the slab before it is attended.
    """

    sessions: int
    pieces: int
    piece_rows: int
    sink_columns: int
    """How many of the first columns may be sinks that are seen at another angle; 0 where none are."""
    logit_rows: int
    hidden_layers: tuple[int, ...] = ()

    @property
    def session_rows(self) -> int:
        return self.pieces * self.piece_rows

    @property
    def rows(self) -> int:
        return self.sessions * self.session_rows


def padded(count: int) -> int:
    """The next of 0, 1, 2, 3, 4, 6, 8, 12, 16, 24, …: at most half as much again."""
    if count < 4:
        return count
    power = 1 << (count - 1).bit_length()
    return power * 3 // 4 if count <= power * 3 // 4 else power

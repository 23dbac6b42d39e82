"""Stop strings in a stream of text."""

from collections.abc import Sequence

from kakeya.errors import InvalidArgument


class StopStrings:
    """Watches a stream for strings that end it and passes on only text that cannot belong to one.

    The stream ends where a stop string is first complete; of two complete at the same character, the longer
    counts. How the text was cut into pieces makes no difference.
    """

    def __init__(self, stops: Sequence[str], *, shows_match: bool = False) -> None:
        """With `shows_match` the stop string itself is shown as well. Raises InvalidArgument unless `stops`
        is a list of strings, none of them empty."""
        if isinstance(stops, str) or "" in stops:
            raise InvalidArgument(f"stop must be a list of strings that are not empty, got {stops!r}")
        self._stops = tuple(stops)
        self._shows_match = shows_match
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that ended the stream; None while it is running."""
        return self._matched

    def feed(self, piece: str) -> str:
        """The text that is now safe to show. Once a stop string has matched, nothing is."""
        if self._matched is not None:
            return ""
        text = self._held + piece
        hits = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            end, start, self._matched = min(hits)
            self._held = ""
            return text[: end if self._shows_match else start]
        safe = len(text) - begun(self._stops, text)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """The text held back for a stop string that never came. Call it once, at the end of the stream."""
        held, self._held = self._held, ""
        return held


def begun(strings: Sequence[str], text: str) -> int:
    """The length of the longest end of `text` that begins one of the strings and is not all of it."""
    longest = max((len(string) for string in strings), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(string.startswith(text[-length:]) for string in strings):
            return length
    return 0

"""How far a run of known size has come, for whoever shows it."""

from collections.abc import Callable

Show = Callable[[float, str], None]


class Work:
    """Counts tokens off a total. `show` hears the share that is done and what is going on."""

    def __init__(self, total: float, show: Show) -> None:
        self._total, self._show = max(1.0, total), show
        self._done, self._label = 0.0, ""

    def begin(self, label: str) -> None:
        self._label = label
        self.advance(0)

    def advance(self, tokens: float) -> None:
        self._done += tokens
        # The total is an estimate in places: a bar never runs over its end.
        self._show(min(1.0, self._done / self._total), self._label)

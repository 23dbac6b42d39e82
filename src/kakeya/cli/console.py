"""What the verbs put on the terminal: answers on stdout, everything else on stderr, bars only where seen."""

import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

# What others say must not drive the terminal: of the control characters only newline and tab remain.
_CONTROL_CODES = dict.fromkeys([c for c in range(32) if chr(c) not in "\n\t"] + list(range(127, 160)))


def harmless(text: str) -> str:
    """Text from elsewhere without what a terminal would obey."""
    return text.translate(_CONTROL_CODES)


class Screen:
    """The two streams of a verb. On a terminal it may use colour; elsewhere it writes plain text."""

    def __init__(self) -> None:
        self.out = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self.err = Console(file=sys.stderr, highlight=False, soft_wrap=True)

    @property
    def is_interactive(self) -> bool:
        """Whether a person sits at both ends."""
        return sys.stdin.isatty() and self.out.is_terminal

    def answer(self, piece: str) -> None:
        """Write a piece of the model's text at once, as it is but for control codes."""
        self.out.file.write(harmless(piece))
        self.out.file.flush()

    def line(self, text: str = "") -> None:
        """Write a plain line on stdout."""
        self.answer(text + "\n")

    def notice(self, text: str, style: str = "dim") -> None:
        """Tell the person something that is not part of an answer."""
        self.err.print(text, style=style, markup=False)


class FetchBar:
    """Shows how a fetch goes: a bar per step on a terminal, a line per step elsewhere. A context manager."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._tasks: dict[str, TaskID | None] = {}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=screen.err,
            transient=True,
            disable=not screen.err.is_terminal,
        )

    def __enter__(self) -> "FetchBar":
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def __call__(self, step: str, done: int, total: int | None) -> None:
        if step not in self._tasks:
            self._tasks[step] = self._begin(step, done, total)
        task = self._tasks[step]
        if task is not None:
            self._bars.update(task, completed=done, total=total)

    def _begin(self, step: str, done: int, total: int | None) -> TaskID | None:
        if self._bars.disable:
            self._screen.notice(step)
            return None
        self._bars.start()
        # Bytes that were there before must not count for the rate.
        return self._bars.add_task(step, completed=done, total=total)


def human_seconds(seconds: float) -> str:
    """A duration for reading: 45 s, 12 min, 4 h 30 min."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return " ".join(f"{count} {unit}" for count, unit in ((hours, "h"), (minutes, "min")) if count)


def human_bytes(size: float) -> str:
    """A size for reading: 23.1 MB, with powers of 1000."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"

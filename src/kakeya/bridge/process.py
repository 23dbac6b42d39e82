"""A run as processes: one that the bridge starts, and whatever that one starts. None outlives the run."""

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from kakeya.bench.processes import clean_environment

# Every process of a run has this in its environment, with the run's id. Benchmarks start servers in sessions
# of their own, which no signal to a process group reaches.
MARK = "BRIDGE_RUN_MARK"
# How long a run is quiet before its limits are looked at.
TICK_S = 0.2
_PIECE_BYTES = 64 * 1024
# What a pipe can hold when nobody writes to it any more.
_LAST_PIECES = 16
_ROUNDS, _ROUND_S = 100, 0.02


class RunProcess:
    """A program in a process group of its own. It gets a pipe as input that ends when we do, and says no more
    than what we read. Used from one thread."""

    def __init__(self, command: Sequence[str], folder: Path, mark: str) -> None:
        """Starts it in `folder`. Raises OSError."""
        self._mark = mark
        self._is_silent = False
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**clean_environment(), MARK: mark},
            start_new_session=True,
        )

    def output(self) -> Iterator[bytes]:
        """What it writes, up to its end; an empty piece every TICK_S when it is quiet."""
        while self._process.poll() is None:
            yield self._read()
        self.end_rest()
        for _ in range(_LAST_PIECES):
            if piece := self._read(0):
                yield piece

    @property
    def exit_status(self) -> int:
        """Once it has ended; that of a signal is negative."""
        return self._process.wait()

    def ask_to_end(self) -> None:
        """As Ctrl-C would: a benchmark then writes its report and stops its servers."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, and all that it has started."""
        self._signal(signal.SIGKILL)
        self.end_rest()

    def end_rest(self) -> None:
        """End what it has started and left behind, in groups of their own too."""
        import psutil

        for _ in range(_ROUNDS):  # one that is about to fork can be missed
            left = [process for process in psutil.process_iter() if self._is_ours(process)]
            if not left:
                return
            for process in left:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(_ROUND_S)  # not waiting for them: that is for whoever started them

    def close(self) -> None:
        """Kill what is left, and free the pipes."""
        self.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _read(self, seconds: float = TICK_S) -> bytes:
        """What there is to read, within so long. One that has closed its output is waited for instead."""
        pipe = self._process.stdout
        assert pipe is not None
        if self._is_silent:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
            return b""
        ready, _, _ = select.select([pipe], [], [], seconds)
        piece = os.read(pipe.fileno(), _PIECE_BYTES) if ready else b""
        self._is_silent = bool(ready) and not piece
        return piece

    def _signal(self, number: signal.Signals) -> None:
        # Not yet waited for, so its number is still its own.
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def _is_ours(self, process: object) -> bool:
        import psutil

        assert isinstance(process, psutil.Process)
        try:
            return bool(process.environ().get(MARK) == self._mark and process.is_running())
        except (psutil.Error, OSError):  # gone, or somebody else's
            return False

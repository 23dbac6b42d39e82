"""A program in a process of its own that answers one line of JSON for each line it is sent."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from kakeya.errors import PeerFailed

# How long it may take to leave before it is made to.
PATIENCE_SECONDS = 10.0


class LineProcess:
    """The parent's end. A context manager; leaving it ends the process.

    `name` stands in what is said when it breaks, which raises PeerFailed.
    """

    name = "the process"

    def __init__(self, worker: Sequence[str], *, own_session: bool = False) -> None:
        """Runs Python with `worker` as arguments; with `own_session` no Ctrl-C of the terminal reaches it."""
        self._own_session = own_session
        # Closed by `close`; a pipe nobody reads could fill up and stall the process.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=own_session,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End the process: politely by closing its input, by force when it does not react."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it is gone already, with the request it never read
        try:
            self._process.wait(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _first_ask(self, request: Any) -> Any:
        """The answer to what opens it; it does not outlive a failure."""
        try:
            return self._ask(request)
        except BaseException:
            self.close()
            raise

    def _ask_within(self, seconds: float, request: Any) -> Any:
        """The answer. The process is killed when it takes longer, with all that it started in a session of
        its own."""
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._kill()

        timer = threading.Timer(seconds, give_up)
        timer.start()
        try:
            return self._ask(request)
        except PeerFailed:
            if not late.is_set():
                raise
            raise PeerFailed(
                f"{self.name} gave no answer within {seconds:g} s; the last it said: {self._last_words()}"
            ) from None
        finally:
            timer.cancel()

    def _kill(self) -> None:
        if not self._own_session:
            self._process.kill()
            return
        with suppress(ProcessLookupError):  # it is gone, and so is all that it started
            os.killpg(self._process.pid, signal.SIGKILL)

    def _ask(self, request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerFailed(f"{self.name} ended unexpectedly: {self._last_words()}")
        return json.loads(line)

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.returncode}, it said nothing"

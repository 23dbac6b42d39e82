"""The engine in a process of its own, without a front end: what `bench overhead` compares with.

Run as a program it opens the model described by the first line of its input, then runs the job once for each
further line and writes what it took.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self, TextIO

from kakeya.bench.overhead_results import Timing
from kakeya.bench.startup import engine_config_from
from kakeya.bench.streams import Job, through_engine
from kakeya.config import EngineConfig
from kakeya.errors import PeerFailed

PATIENCE_SECONDS = 10.0


class DirectEngine:
    """The parent's end of the process. A context manager; leaving it ends the process."""

    def __init__(self, model: str, config: EngineConfig, job: Job) -> None:
        # Closed by `close`; a pipe nobody reads could fill up and stall the process.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kakeya.bench.direct"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )
        opening = {"model": model, "config": asdict(config), "job": asdict(job)}
        try:
            self._ask(opening)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def measure(self, work: str) -> Timing:
        """One repetition. Raises PeerFailed when the process broke."""
        return Timing(**self._ask(work))

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
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
            self._process.wait()
            self._errors.seek(0)
            lines = self._errors.read().strip().splitlines()
            raise PeerFailed(f"the engine's process ended: {(lines or ['it said nothing'])[-1]}")
        return json.loads(line)


def main(requests: TextIO, answers: TextIO) -> None:
    """The process: open, then one timing for each line."""
    from kakeya.runtime import Runtime

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    opening = json.loads(requests.readline())
    job = Job(**opening["job"])
    with Runtime.open(opening["model"], engine_config_from(opening["config"])) as runtime:
        answer("ready")
        for line in requests:
            answer(asdict(through_engine(runtime, job, json.loads(line))))


if __name__ == "__main__":
    main(sys.stdin, sys.stdout)

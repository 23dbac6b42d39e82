"""The engine in a process of its own, without a front end: what `bench overhead` compares with.

Run as a program it opens the model described by the first line of its input, then runs the job once for each
further line and writes what it took.
"""

import json
import sys
from dataclasses import asdict
from typing import TextIO

from kakeya.bench.line_process import LineProcess
from kakeya.bench.overhead_results import Timing
from kakeya.bench.startup import engine_config_from
from kakeya.bench.streams import Job, through_engine
from kakeya.config import EngineConfig


class DirectEngine(LineProcess):
    """The parent's end of the process. A context manager; leaving it ends the process."""

    name = "the engine's process"

    def __init__(self, model: str, config: EngineConfig, job: Job) -> None:
        super().__init__(("-m", "kakeya.bench.direct"), own_session=True)
        self._first_ask({"model": model, "config": asdict(config), "job": asdict(job)})

    def measure(self, work: str) -> Timing:
        """One repetition. Raises PeerFailed when the process broke."""
        return Timing(**self._ask(work))


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

"""How long a fresh process takes to load a model and to give its first token.

Run as a program it opens the model described by its one JSON argument and says on standard output when
it is ready and when the first token came; the parent holds the clock, so imports are counted too.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict

from kakeya.bench.report import from_json
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError

QUESTION = "What is the capital of France?"


def launch(model: str, config: EngineConfig) -> tuple[float, float]:
    """Seconds to a loaded model, and from there to the first token. Raises ConfigError when it fails."""
    argument = json.dumps({"model": model, "config": asdict(config)})
    command = [sys.executable, "-m", "kakeya.bench.startup", argument]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        stamps = [time.perf_counter() for _ in process.stdout]
        _, errors = process.communicate()
    if process.returncode != 0 or len(stamps) != 2:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        raise ConfigError(f"a fresh process could not load the model: {last}")
    ready, first = stamps
    return ready - began, first - ready


def main(argument: str) -> None:
    """The fresh process: load, say so, answer one token, say so."""
    from kakeya.runtime import Runtime  # here, so that its imports fall inside the measured time

    asked = json.loads(argument)
    with Runtime.open(asked["model"], from_json(EngineConfig, asked["config"])) as runtime:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        session_id = runtime.create_session(client_label="bench")
        runtime.append(session_id, runtime.tokenizer.encode(QUESTION))
        for _ in runtime.generate(session_id, 1):
            pass
        sys.stdout.write("first token\n")


if __name__ == "__main__":
    main(sys.argv[1])

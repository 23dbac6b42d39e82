"""How long a fresh process takes to load a model and to give its first token.

Run as a program it opens the model described by its one JSON argument and says on standard output when
it is ready and when the first token came; the parent holds the clock, so imports are counted too.
"""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from kakeya.bench.engine_results import Startup
from kakeya.config import CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from kakeya.types import BackendChoice, DType, KernelChoice, Numerics, WeightFormat

QUESTION = "What is the capital of France?"


def measure_startup(model: str, config: EngineConfig, repeats: int) -> Startup:
    """Launch `repeats` processes one after the other. Raises ConfigError when one cannot start."""
    argument = json.dumps({"model": model, "config": asdict(config)})
    times = [_launch(argument) for _ in range(repeats)]
    return Startup(tuple(ready for ready, _ in times), tuple(first for _, first in times))


def _launch(argument: str) -> tuple[float, float]:
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


def engine_config_from(fields: Mapping[str, Any]) -> EngineConfig:
    """The settings that `dataclasses.asdict` wrote, after a trip through JSON."""
    return EngineConfig(
        **{
            **fields,
            "backend": BackendChoice(fields["backend"]),
            "cache": CacheConfig(**fields["cache"]),
            "numerics": Numerics(fields["numerics"]),
            "dtype": DType(fields["dtype"]),
            "weights": WeightFormat(fields["weights"]),
            "kernels": KernelChoice(fields["kernels"]),
        }
    )


def main(argument: str) -> None:
    """The fresh process: load, say so, answer one token, say so."""
    from kakeya.runtime import Runtime  # here, so that its imports fall inside the measured time

    asked = json.loads(argument)
    with Runtime.open(asked["model"], engine_config_from(asked["config"])) as runtime:
        _say("ready")
        session_id = runtime.create_session(client_label="bench")
        runtime.append(session_id, runtime.tokenizer.encode(QUESTION))
        for _ in runtime.generate(session_id, 1):
            pass
        _say("first token")


def _say(what: str) -> None:
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])

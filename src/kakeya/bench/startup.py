"""How long fresh processes take to load a model and to give a first token: one that opens it, and a chat.

Run as a program it opens the model described by its one JSON argument and says on standard output when
it is ready and when the first token came; the parent holds the clock, so imports are counted too.
"""

import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from typing import NamedTuple

from kakeya.bench.processes import clean_environment
from kakeya.bench.report import from_json
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError
from kakeya.garbage import uncollected
from kakeya.options import ComputeOptions, flags

QUESTION = "What is the capital of France?"
_CHAT_FLAGS = ("model", "backend", "threads", "kernels", "weights", "dtype")
_ANSWER_TOKENS = 8
_CHATS = "ready to chat"


class Launch(NamedTuple):
    """Seconds to a loaded model, and from there to the first token; whether `kakeya chat` can talk to it."""

    ready_seconds: float
    first_token_seconds: float
    chats: bool


def launch(model: str, config: EngineConfig) -> Launch:
    """Open the model in a fresh process. Raises ConfigError when it fails."""
    argument = json.dumps({"model": model, "config": asdict(config)})
    command = [sys.executable, "-m", "kakeya.bench.startup", argument]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [(time.perf_counter(), line.strip()) for line in process.stdout]
        _, errors = process.communicate()
    if process.returncode != 0 or len(told) != 2:
        raise ConfigError(f"a fresh process could not load the model: {_last_line(errors)}")
    (ready, says), (first, _) = told
    return Launch(ready - began, first - ready, chats=says == _CHATS)


def chat(engine: ComputeOptions) -> float:
    """Seconds from the command `kakeya chat` to the first character of its answer to a line of input, with
    the proposers that a user has. Raises ConfigError when it fails."""
    asked = {name: getattr(engine, name) for name in _CHAT_FLAGS} | {"max_tokens": _ANSWER_TOKENS}
    command = [sys.executable, "-m", "kakeya", "chat", *flags(asked)]
    pipe, environment = subprocess.PIPE, clean_environment()
    began = time.perf_counter()
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended already, and says why
            process.stdin.write(f"{QUESTION}\n".encode())
            process.stdin.flush()
        first = process.stdout.read(1)
        seconds = time.perf_counter() - began
        _, errors = process.communicate()
    if process.returncode != 0 or not first:
        raise ConfigError(f"`kakeya chat` gave no answer: {_last_line(errors.decode(errors='replace'))}")
    return seconds


def _last_line(errors: str) -> str:
    return (errors.strip().splitlines() or ["no message"])[-1]


def main(argument: str) -> None:
    """The fresh process: load, say so, answer one token, say so."""
    asked = json.loads(argument)
    with uncollected():  # as every verb that opens a model
        from kakeya.runtime import Runtime  # here, so that its imports fall inside the measured time

        opened = Runtime.open(asked["model"], from_json(EngineConfig, asked["config"]))
    with opened as runtime:
        sys.stdout.write(f"{_CHATS if runtime.tokenizer.has_chat_template else 'ready'}\n")
        sys.stdout.flush()
        session_id = runtime.create_session(client_label="bench")
        runtime.append(session_id, runtime.tokenizer.encode(QUESTION))
        for _ in runtime.generate(session_id, 1):
            pass
        sys.stdout.write("first token\n")


if __name__ == "__main__":
    main(sys.argv[1])

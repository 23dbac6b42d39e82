"""Whole runtimes over a tiny model, for tests of what lies above the engine."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kakeya.config import EngineConfig
from kakeya.engine.sequence import TokenSequence
from kakeya.models.checkpoint import open_checkpoint
from kakeya.runtime import Runtime
from kakeya.text import Tokenizer
from kakeya.types import Event
from support import tiny
from support.vocabularies import byte_level_files

PROMPT = [5, 9, 22, 13, 7]


@contextmanager
def tiny_runtime(directory: Path, config: EngineConfig | None = None, **options: object) -> Iterator[Runtime]:
    """A runtime over the tiny checkpoint in `directory`; its tokenizer is a stranger to the model."""
    threads = torch.get_num_threads()
    config = config or tiny.engine_config(threads=1)
    checkpoint, tokenizer = open_checkpoint(directory), Tokenizer(byte_level_files())
    try:
        with Runtime.open(checkpoint, config, name="tiny", tokenizer=tokenizer, **options) as runtime:
            yield runtime
    finally:
        torch.set_num_threads(threads)


def new_session(runtime: Runtime, prompt: list[int] = PROMPT, **options: object) -> str:
    """A session that never ends by itself, with a prompt in it."""
    session_id = runtime.create_session(eos_token_ids=(), **options)
    runtime.append(session_id, prompt, owner=options.get("owner", "local"))
    return session_id


def answer(runtime: Runtime, session_id: str, count: int, **options: object) -> list[Event]:
    """All events of one generate."""
    return list(runtime.generate(session_id, count, **options))


def sequence_of(runtime: Runtime, session_id: str, owner: str = "local") -> TokenSequence:
    """The engine's half of a session, to look at or to break."""
    return runtime._store.get(session_id, owner).sequence

"""Sessions of a backend that runs ahead sleep, wake and survive as those of the CPU's do.

It is the CUDA backend with torch kernels on a CPU, without streams of a device.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.config import RuntimeConfig, StateConfig
from kakeya.loading import load_model
from kakeya.models.checkpoint import open_checkpoint
from kakeya.runtime import Runtime
from kakeya.text import Tokenizer
from kakeya.types import Numerics, SamplingParams, TokenEvent
from support import tiny
from support.crashes import Crashed
from support.tiny import answer, new_session

SEEDED = SamplingParams(temperature=1.0, seed=7)
PROMPTS = [[5 + number, 9, 22, 13, 7 + number] for number in range(5)]
Open = Callable[[int, RuntimeConfig], Runtime]


@pytest.fixture
def open_device(tmp_path: Path) -> Iterator[Open]:
    model = tiny.write_llama(tmp_path / "model")
    with ExitStack() as stack:

        def opened(capacity: int, settings: RuntimeConfig) -> Runtime:
            config = tiny.engine_config(threads=1, capacity=capacity, numerics=Numerics.EXACT)
            tokenizer = Tokenizer(tiny.byte_level_files())
            loaded = load_model(open_checkpoint(model), config, "tiny", tokenizer)
            backend = tiny.make_device_backend(model, config)
            return stack.enter_context(Runtime(replace(loaded, backend=backend), settings).start())

        yield opened


def kept(directory: Path, host_bytes: int) -> RuntimeConfig:
    state = StateConfig(directory, host_tier_bytes=host_bytes, snapshot_tokens=6)
    return RuntimeConfig(session_idle_ttl_s=None, state=state)


def talk(runtime: Runtime, sessions: list[str]) -> list[list[int]]:
    """What each says in two turns, by turns."""
    said: list[list[int]] = [[] for _ in sessions]
    for _ in range(2):
        for place, session in enumerate(sessions):
            events = answer(runtime, session, 7, sampling=SEEDED)
            said[place] += [event.token_id for event in events if isinstance(event, TokenEvent)]
            runtime.append(session, [11, 12])
    return said


@pytest.mark.parametrize("host_bytes", [0, 2**30], ids=["disk", "host"])
def test_sessions_sleep_and_go_on_exactly_also_after_a_crash(
    open_device: Open, tmp_path: Path, crashed: Crashed, host_bytes: int
) -> None:
    awake = open_device(len(PROMPTS), RuntimeConfig())
    slept = open_device(2, kept(tmp_path / "a", host_bytes))
    mine, theirs = ([new_session(each, prompt) for prompt in PROMPTS] for each in (slept, awake))
    assert talk(slept, mine) == talk(awake, theirs)
    tiers = slept.tiers()
    assert tiers is not None
    assert (tiers.active, tiers.host > 0) == (2, host_bytes > 0)
    later = open_device(2, kept(crashed(tmp_path / "a", tmp_path / "b"), host_bytes))
    assert talk(later, mine) == talk(awake, theirs)

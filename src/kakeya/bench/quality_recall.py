"""The part `recall` of `bench quality`: a number is said, prose goes by, and then it is asked for."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kakeya.bench.prose import stretch
from kakeya.bench.quality_memory import cache_of
from kakeya.bench.quality_memory_results import Way
from kakeya.bench.quality_recall_results import BOUNDED, FULL, PINNED, Trial, recall_rows
from kakeya.bench.work import Work
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError
from kakeya.runtime import Runtime
from kakeya.types import TokenEvent

SAID = "\n\nNote this down: the secret number is {key}. Remember it, {key} is the secret number.\n\n"
ASKED = "\n\nQuestion: What is the secret number?\nAnswer: The secret number is"
# Prose before the number, so that it is not what a session begins with.
LEAD = (16, 64)
ANSWER_TOKENS = 10
# More than a number, the question and the lead take.
AROUND_TOKENS = 512
# A prefix with the number in it must fit, whatever the tokenizer.
LEAST_KEPT = 256


@dataclass(frozen=True)
class RecallBench:
    """How far away, how often each, with which bounded memory."""

    bounded: Way
    distances: tuple[int, ...] = (128, 256, 512, 900, 1500, 3000, 6000)
    trials: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.distances or min(self.distances) < 1:
            raise ConfigError(f"distances must be whole numbers from 1, got {list(self.distances)}")
        if self.trials < 1:
            raise ConfigError(f"trials must be at least 1, got {self.trials}")
        if cache_of(self.bounded).capacity < LEAST_KEPT:
            raise ConfigError(
                f"recall needs a memory of at least {LEAST_KEPT} tokens to pin a number in, "
                f"got {self.bounded.label}"
            )

    @property
    def full(self) -> Way:
        """A window that forgets nothing of the longest talk."""
        return Way(0, max(self.distances) + AROUND_TOKENS, full=True)

    @property
    def work(self) -> int:
        """How many tokens of prose will go by: most of what is computed."""
        return 3 * self.trials * sum(self.distances)


@dataclass(frozen=True)
class Talk:
    """What one trial says: some prose with a number at its end, more prose, and the question."""

    distance: int
    key: str
    opening: list[int]
    said: list[int]
    prose: list[int]
    asked: list[int]

    @property
    def pinned(self) -> int:
        """How long a prefix holds the number."""
        return len(self.opening) + len(self.said)

    @property
    def token_ids(self) -> list[int]:
        return [*self.opening, *self.said, *self.prose, *self.asked]

    @property
    def overhead(self) -> int:
        """What lies between the number's first token and the answer's last, besides the prose."""
        return len(self.said) + len(self.asked) + ANSWER_TOKENS


def talks(runtime: Runtime, bench: RecallBench, token_ids: Sequence[int]) -> Iterator[Talk]:
    """Every trial at every distance. They follow from the seed: all memories are asked the same."""
    encode = runtime.tokenizer.encode
    start = encode("", bos=True)
    for distance in bench.distances:
        for trial in range(bench.trials):
            chance = random.Random(f"{bench.seed} {distance} {trial}")
            key = str(chance.randrange(10_000, 100_000))
            place, lead = chance.randrange(len(token_ids)), chance.randint(*LEAD)
            yield Talk(
                distance,
                key,
                opening=[*start, *stretch(token_ids, place, lead)],
                said=encode(SAID.format(key=key)),
                prose=stretch(token_ids, place + lead, distance),
                asked=encode(ASKED),
            )


def measure(
    model: str, config: EngineConfig, bench: RecallBench, token_ids: Sequence[int], work: Work
) -> Iterator[dict[str, Any]]:
    """The results so far after each memory: full attention, bounded, and bounded with the number pinned."""
    rows: list[dict[str, Any]] = []
    for memory, way in ((FULL, bench.full), (BOUNDED, bench.bounded), (PINNED, bench.bounded)):
        work.begin(f"recall: {memory}")
        with Runtime.open(model, replace(config, cache=cache_of(way), capacity=1)) as runtime:
            trials: list[Trial] = []
            overhead = 0
            for talk in talks(runtime, bench, token_ids):
                trials.append(_tried(runtime, talk, pin=memory == PINNED))
                overhead = max(overhead, talk.overhead)
                work.advance(talk.distance)
        rows += recall_rows(memory, trials, reach=way.window - overhead)
        yield {"rows": list(rows), "bounded": bench.bounded.label}


def _tried(runtime: Runtime, talk: Talk, *, pin: bool) -> Trial:
    session_id = runtime.create_session(pinned_prefix_tokens=talk.pinned if pin else None)
    try:
        runtime.append(session_id, talk.token_ids)
        events = runtime.generate(session_id, ANSWER_TOKENS)
        answer = [event.token_id for event in events if isinstance(event, TokenEvent)]
    finally:
        runtime.close_session(session_id)
    return Trial(talk.distance, talk.key, runtime.tokenizer.decode(answer))

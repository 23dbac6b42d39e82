"""The part recall: a number is said, prose goes by, and then it is asked for."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kakeya.bench.benchmark import Work
from kakeya.bench.quality.scoring import Found, open_alone
from kakeya.bench.report import Gate, at_most
from kakeya.bench.tables import Chart, Series, Table, listing
from kakeya.bench.text import stretch
from kakeya.types import TokenEvent

if TYPE_CHECKING:
    from kakeya.bench.quality.benchmark import QualityBench
    from kakeya.runtime import Runtime

FULL, BOUNDED, PINNED = "full", "bounded", "pinned"
LOSS_LIMIT = 0.2
# A model that fails with everything before its eyes says nothing about memory.
LEAST_FULL_RECALL = 0.5
SAID = "\n\nNote this down: the secret number is {key}. Remember it, {key} is the secret number.\n\n"
ASKED = "\n\nQuestion: What is the secret number?\nAnswer: The secret number is"
# Prose before the number, so that it is not what a session begins with.
LEAD = (16, 64)
ANSWER_TOKENS = 10


@dataclass(frozen=True)
class Answer:
    """A number that was said, and what came when it was asked for."""

    key: str
    answer: str


@dataclass(frozen=True)
class RecallRow:
    """What a memory recalled at one distance. `within_window`: what was said is still in the window."""

    memory: str
    distance: int
    within_window: bool
    answers: tuple[Answer, ...]

    @property
    def trials(self) -> int:
        return len(self.answers)

    @property
    def right(self) -> int:
        return sum(each.key in each.answer for each in self.answers)

    @property
    def recall(self) -> float:
        return self.right / self.trials


@dataclass(frozen=True)
class RecallResults:
    """A row for each memory and distance; `bounded` is the bounded memory in words."""

    rows: tuple[RecallRow, ...] = ()
    bounded: str = ""

    def share(self, memory: str, distances: Sequence[int]) -> float | None:
        """Of right answers over these distances; None where nothing was asked."""
        chosen = [row for row in self.rows if row.memory == memory and row.distance in distances]
        asked = sum(row.trials for row in chosen)
        return sum(row.right for row in chosen) / asked if asked else None

    def gates(self) -> list[Gate]:
        """Within its window, bounded memory recalls nearly what full attention does."""
        within = [row.distance for row in self.rows if row.memory == BOUNDED and row.within_window]
        full, bounded = (self.share(memory, within) for memory in (FULL, BOUNDED))
        value, absent = None, "no distance within the window was tried with both"
        if full is not None and bounded is not None:
            # Rounded: 0.9 - 0.7 is not to be more than 0.2.
            value = round(full - bounded, 9) if full >= LEAST_FULL_RECALL else None
            absent = f"full attention itself recalls {full:.2f}, less than {LEAST_FULL_RECALL}"
        return [at_most("recall_lost_within_the_window", value, LOSS_LIMIT, absent=absent)]

    def show(self) -> Iterator[Table | Chart]:
        """Right answers by memory and distance, for the memories that were tried."""
        names = {FULL: "full", BOUNDED: self.bounded, PINNED: f"{self.bounded}, number pinned"}
        distances = sorted({row.distance for row in self.rows})
        headings = [f"{distance:,}" for distance in distances]
        cells, series = [], []
        for memory in dict.fromkeys(row.memory for row in self.rows):
            found = {row.distance: row for row in self.rows if row.memory == memory}
            rows = [found.get(distance) for distance in distances]
            cells.append([names[memory], *(row and f"{row.right}/{row.trials}" for row in rows)])
            series.append(Series(names[memory], [None if row is None else row.recall for row in rows]))
        yield listing("Right answers", ("a number said so many tokens ago", *headings), cells, labels=1)
        x_title = "share of right answers by tokens since it was said"
        yield Chart("Recall by distance", "right", x_title, headings, series)


@dataclass(frozen=True)
class Talk:
    """What one trial says. `pinned`: how long a prefix holds the number; `overhead`: what lies between the
    number's first token and the answer's last, besides the prose."""

    key: str
    token_ids: list[int]
    pinned: int
    overhead: int


def talk(runtime: "Runtime", token_ids: Sequence[int], distance: int, seed: str) -> Talk:
    """Some prose with a number at its end, more prose, and the question. It follows from the seed."""
    encode, chance = runtime.tokenizer.encode, random.Random(seed)
    key = str(chance.randrange(10_000, 100_000))
    place, lead = chance.randrange(len(token_ids)), chance.randint(*LEAD)
    opening = [*encode("", bos=True), *stretch(token_ids, place, lead)]
    said, asked = encode(SAID.format(key=key)), encode(ASKED)
    whole = [*opening, *said, *stretch(token_ids, place + lead, distance), *asked]
    return Talk(key, whole, len(opening) + len(said), len(said) + len(asked) + ANSWER_TOKENS)


def measure_recall(bench: "QualityBench", token_ids: Sequence[int], work: Work) -> Found:
    """Full attention, bounded memory, and bounded memory with the number pinned: all are asked the same."""
    results = RecallResults(bounded=bench.judged.label())
    for memory, way in ((FULL, bench.forgets_nothing), (BOUNDED, bench.judged), (PINNED, bench.judged)):
        work.begin(f"recall: {memory}")
        with open_alone(bench, way.cache()) as runtime:
            for distance in bench.distances_asked:
                seeds = [f"{bench.seed} {distance} {trial}" for trial in range(bench.trials)]
                talks = [talk(runtime, token_ids, distance, seed) for seed in seeds]
                reach = way.window - max(each.overhead for each in talks)
                answers = [Answer(each.key, _answer(runtime, each, memory)) for each in talks]
                row = RecallRow(memory, distance, distance <= reach, tuple(answers))
                results = replace(results, rows=(*results.rows, row))
                work.advance(bench.trials * distance)
        yield {"recall": results}


def _answer(runtime: "Runtime", said: Talk, memory: str) -> str:
    session_id = runtime.create_session(pinned_prefix_tokens=said.pinned if memory == PINNED else None)
    try:
        runtime.append(session_id, said.token_ids)
        events = runtime.generate(session_id, ANSWER_TOKENS)
        answer = [event.token_id for event in events if isinstance(event, TokenEvent)]
    finally:
        runtime.close_session(session_id)
    return runtime.tokenizer.decode(answer)

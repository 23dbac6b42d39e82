"""`kakeya bench speculation --acceptances`: what a proposer gains that is right so often, as a curve."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kakeya.bench.report import Gate, at_least
from kakeya.bench.stats import Samples, known, median_of_ratios
from kakeya.bench.tables import Chart, Column, Series, Table

PLAIN, BLOCKS, AS_IT_PAYS = "plain", "blocks", "as it pays"
WORST = 0.97
# What blocks of 8 must gain on the large shape where a guess is right with probability 0.8, by sessions.
LARGE, LARGE_ACCEPTANCE, LARGE_GAINS = "qwen3-8b", 0.8, {1: 3.0, 64: 2.0}


@dataclass(frozen=True)
class Gain:
    """Tokens a second of all three ways where a guess is right with a chosen probability.

    `blocks` drafts all that is guessed; `accepted` and `proposed` are its own. `as_it_pays` drafts as much as
    the engine thinks will pay. `same` is the share of answers like those of plain decoding.
    """

    model: str
    sessions: int
    acceptance: float
    plain: Samples
    blocks: Samples
    as_it_pays: Samples
    proposed: int
    accepted: int
    tokens: int
    same: float

    @property
    def blocks_speedup(self) -> float | None:
        return median_of_ratios(self.blocks.samples, self.plain.samples)

    @property
    def as_it_pays_speedup(self) -> float | None:
        return median_of_ratios(self.as_it_pays.samples, self.plain.samples)

    @property
    def tokens_a_step(self) -> float:
        return self.tokens / (self.tokens - self.accepted)


def gates(rows: Sequence[Gain], noise: str | None, absent: str) -> Iterator[Gate]:
    """Nothing becomes slower or different, and the large shape gains what it must."""
    judged = [] if noise else rows
    worst = min(known(row.as_it_pays_speedup for row in judged), default=None)
    same = min((row.same for row in rows), default=None)
    for sessions, limit in LARGE_GAINS.items() if any(row.model == LARGE for row in rows) else ():
        wanted = (LARGE, sessions, LARGE_ACCEPTANCE)
        found = (row.blocks_speedup for row in judged if (row.model, row.sessions, row.acceptance) == wanted)
        name = f"{LARGE}, {sessions} at once, acceptance {LARGE_ACCEPTANCE:g}: speed over plain"
        yield at_least(name, next(found, None), limit, absent=noise or absent)
    yield at_least("the least speed over plain, drafts as they pay", worst, WORST, absent=noise or absent)
    yield at_least("answers that are the same", same, 1.0, absent=absent)


def show(rows: Sequence[Gain]) -> list[Table | Chart]:
    parts: list[Table | Chart] = [Table("Speed over plain decoding by acceptance", _COLUMNS, rows)]
    for place, sessions in enumerate(dict.fromkeys(row.sessions for row in rows)):
        of_these = [row for row in rows if row.sessions == sessions]
        series = [
            Series("all that is guessed", [row.blocks_speedup for row in of_these]),
            Series("as it pays", [row.as_it_pays_speedup for row in of_these]),
        ]
        title, at = f"{of_these[0].model}, {sessions} at once", [row.acceptance for row in of_these]
        chart = Chart(title, "times plain decoding", "chance that a guess is right", at, series)
        parts.append(replace(chart, picture=place == 0))
    return parts


_COLUMNS = [
    Column("model", "model"),
    Column("sessions", "sessions"),
    Column("chance of a guess", "acceptance", form="g"),
    Column("plain, tokens/s", "plain.median", form=",.1f"),
    Column("all drafted, tokens/s", "blocks.median", form=",.1f"),
    Column("as it pays, tokens/s", "as_it_pays.median", form=",.1f"),
    Column("all drafted over plain", "blocks_speedup", form=".2f"),
    Column("as it pays over plain", "as_it_pays_speedup", form=".2f"),
    Column("tokens a step, all drafted", "tokens_a_step", form=".2f"),
    Column("same answers", "same", form=".0%"),
]

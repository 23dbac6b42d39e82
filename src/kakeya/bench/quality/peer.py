"""The part peer: the same tokens of the same files through llama.cpp.

What differs is arithmetic alone: every passage begins a session, and a context, of its own, and fits in it
whole.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kakeya.bench.benchmark import Work
from kakeya.bench.machine import public_name
from kakeya.bench.peers.llama import LlamaProcess, require_llama
from kakeya.bench.quality.scoring import PASSAGE_TOKENS, Found, cut, open_alone, perplexity, surprises
from kakeya.bench.report import Gate, at_most
from kakeya.bench.stats import ratio
from kakeya.bench.tables import Chart, Column, Table
from kakeya.config import CacheConfig

if TYPE_CHECKING:
    from kakeya.bench.quality.benchmark import QualityBench

ASKED_BY = "--part peer"
# How far the two perplexities may be apart, as a share of llama.cpp's.
APART_LIMIT = 0.005
SCORED_NEEDED = 450
# Room for what a document begins with.
START_TOKENS = 8


@dataclass(frozen=True)
class PeerRow:
    """A file that both have read. The standard error is of the ratio, as a share of it: how far another text
    of this length might move it."""

    file: str
    held_as: str
    scored: int
    ours: float | None
    llama_cpp: float | None
    standard_error: float | None

    @classmethod
    def of(cls, file: str, held_as: str, ours: Sequence[float], theirs: Sequence[float]) -> "PeerRow":
        """How much the same tokens surprised each of them, in nats."""
        differences = [mine - other for mine, other in zip(ours, theirs, strict=True)]
        enough = len(differences) >= 2
        error = statistics.stdev(differences) / math.sqrt(len(differences)) if enough else None
        return cls(file, held_as, len(ours), perplexity(ours), perplexity(theirs), error)

    @property
    def ours_over_llama_cpp(self) -> float | None:
        return ratio(self.ours, self.llama_cpp)

    def gate(self) -> Gate:
        """The perplexities are about the same, in either direction."""
        over = self.ours_over_llama_cpp
        value, absent = None if over is None else abs(over - 1), "a perplexity is no number"
        if self.scored < SCORED_NEEDED:
            value, absent = None, f"needs {SCORED_NEEDED:,} scored tokens, got {self.scored:,}"
        return at_most(f"{self.file}: perplexity apart from llama.cpp's", value, APART_LIMIT, absent=absent)


_COLUMNS = [
    Column("file", "file"),
    Column("held as", "held_as"),
    Column("scored tokens", "scored"),
    Column("ours", "ours", form=",.4f"),
    Column("llama.cpp", "llama_cpp", form=",.4f"),
    Column("ours/llama.cpp", "ours_over_llama_cpp", form=".5f"),
    Column("standard error", "standard_error", form=".5f"),
]


@dataclass(frozen=True)
class PeerResults:
    """llama.cpp's version, what it was built for, and a row for each file."""

    library: str
    system: str
    files: tuple[PeerRow, ...] = ()

    def gates(self) -> list[Gate]:
        return [row.gate() for row in self.files]

    def show(self) -> Iterator[Table | Chart]:
        yield Table(f"Perplexity beside {self.library}", _COLUMNS, self.files, labels=2)


def measure_peer(bench: "QualityBench", token_ids: Sequence[int], work: Work) -> Found:
    """Raises ConfigError for a file that llama.cpp cannot read."""
    rows = []
    size = PASSAGE_TOKENS + START_TOKENS
    for file in (bench.model, *map(str, bench.also or ())):
        name = public_name(file)
        work.begin(f"{name}: ours")
        with open_alone(bench, CacheConfig(sink=0, window=size), file) as runtime:
            facts, encode = runtime.describe(), runtime.tokenizer.encode
            require_llama(facts.path, asked_by=ASKED_BY)
            passages = cut(encode(bench.read_text())[: bench.peer_tokens], PASSAGE_TOKENS)
            ours = [nats for passage in passages for nats in surprises(runtime, passage, work)]
            start = encode("", bos=True)
        work.begin(f"{name}: llama.cpp")
        with LlamaProcess(facts.path, bench.config.threads, ()) as process:
            theirs: list[float] = []
            for passage in passages:  # as ours: neither a document's start nor the first token behind it
                theirs += process.surprises([*start, *passage])[len(start) :]
                work.advance(len(passage))
            rows.append(PeerRow.of(name, facts.weights, ours, theirs))
            yield {"peer": PeerResults(process.peer.library, process.peer.system, tuple(rows))}

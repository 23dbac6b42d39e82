"""The part `peer` of `bench quality`: the same tokens through our runtime and through llama.cpp.

Both read the same file, so what differs is arithmetic alone. Every passage begins a session, and a context,
of its own, and fits in it whole: what one forgets and the other does not plays no part.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kakeya.bench.machine import public_name
from kakeya.bench.peers import PeerProcess, require_peer
from kakeya.bench.prose import prose
from kakeya.bench.quality_choices import TEXT_TOKENS, cut
from kakeya.bench.quality_memory import surprises
from kakeya.bench.quality_peer_results import peer_row
from kakeya.bench.work import Work
from kakeya.config import CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from kakeya.runtime import Runtime

ASKED_BY = "--part peer"
# Room for what a document begins with.
START_TOKENS = 8


@dataclass(frozen=True)
class PeerBench:
    """Which files beside the model, and how much text in passages of what size."""

    also: tuple[str, ...] = ()
    passage_tokens: int = 512
    most_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.most_tokens is not None and self.most_tokens < 2:
            raise ConfigError(f"peer-tokens must be at least 2, got {self.most_tokens}")

    @property
    def work(self) -> int:
        """How many tokens will be computed, by both."""
        return 2 * (1 + len(self.also)) * (self.most_tokens or TEXT_TOKENS)

    @property
    def settings(self) -> dict[str, Any]:
        """As a report has them."""
        return {
            "text": "bench/data/galapagos.txt",
            "passage_tokens": self.passage_tokens,
            "most_tokens": self.most_tokens,
        }


@dataclass(frozen=True)
class OurReading:
    """A file that our runtime has read: what the peer needs to read it too, and how we fared."""

    path: str
    held_as: str
    start: list[int]
    passages: list[list[int]]
    surprises: list[float]


def measure(model: str, config: EngineConfig, bench: PeerBench, work: Work) -> Iterator[dict[str, Any]]:
    """The results so far after each file. Raises ConfigError for a file that llama.cpp cannot read."""
    rows: list[dict[str, Any]] = []
    for each in (model, *bench.also):
        name = public_name(each)
        work.begin(f"{name}: ours")
        read = _ours(each, config, bench, work)
        work.begin(f"{name}: llama.cpp")
        with PeerProcess(read.path, config.threads, ()) as peer:
            theirs = their_surprises(peer, read, work)
            rows.append(peer_row(name, read.held_as, read.surprises, theirs))
            yield {**peer.facts, "files": list(rows)}


def _ours(model: str, config: EngineConfig, bench: PeerBench, work: Work) -> OurReading:
    cache = CacheConfig(sink=0, window=bench.passage_tokens + START_TOKENS)
    with Runtime.open(model, replace(config, cache=cache, capacity=1)) as runtime:
        facts = runtime.describe()
        require_peer(facts.path, asked_by=ASKED_BY)
        passages = cut(runtime.tokenizer.encode(prose())[: bench.most_tokens], bench.passage_tokens)
        found = [nats for passage in passages for nats in surprises(runtime, passage, work)]
        start = runtime.tokenizer.encode("", bos=True)
    return OurReading(facts.path, facts.weights, start, passages, found)


def their_surprises(peer: PeerProcess, read: OurReading, work: Work) -> list[float]:
    """As `surprises` counts them: neither what a document begins with nor the first token after it."""
    found: list[float] = []
    for passage in read.passages:
        found += peer.surprises([*read.start, *passage])[len(read.start) :]
        work.advance(len(passage))
    return found


def check_files(paths: Sequence[str]) -> None:
    """Refuse what cannot be compared, before anything is measured. Raises ConfigError."""
    require_peer(asked_by=ASKED_BY)
    for path in paths:
        require_peer(path, asked_by=ASKED_BY)
        if not Path(path).is_file():
            raise ConfigError(f"{ASKED_BY} compares files, and there is none at {path}")

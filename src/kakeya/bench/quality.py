"""`kakeya bench quality`: what arithmetic costs, what bounded memory costs, and what it keeps.

Four parts, each of which may be left out: `choices` of dtype, weights and kernels; `memory`, perplexity by
place in a long history; `recall` of what was said some way back; `peer`, perplexity beside llama.cpp's.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from kakeya.bench import quality_choices, quality_memory, quality_peer, quality_recall
from kakeya.bench.gates import Gate
from kakeya.bench.long_text import LongText
from kakeya.bench.machine import machine_facts, public_name
from kakeya.bench.quality_choices import ChoicesBench
from kakeya.bench.quality_memory import MemoryBench
from kakeya.bench.quality_memory_results import memory_gates
from kakeya.bench.quality_peer import PeerBench
from kakeya.bench.quality_peer_results import peer_gates
from kakeya.bench.quality_recall import RecallBench
from kakeya.bench.quality_recall_results import recall_gates
from kakeya.bench.quality_results import quality_gates
from kakeya.bench.report import Report, now
from kakeya.bench.work import Show, Work
from kakeya.config import CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from kakeya.runtime import Runtime


@dataclass(frozen=True)
class QualityBench:
    """The model, the engine's other settings, the text that is read at length, and the parts to measure."""

    model: str
    config: EngineConfig
    text: LongText
    choices: ChoicesBench | None = None
    memory: MemoryBench | None = None
    recall: RecallBench | None = None
    peer: PeerBench | None = None

    @property
    def work(self) -> float:
        """How many tokens will be computed, roughly."""
        parts = (self.choices, self.memory, self.recall, self.peer)
        return sum(part.work for part in parts if part is not None)


def run(bench: QualityBench, show: Show, checkpoint: Callable[[Report], object]) -> Report:
    """Measure the parts and return the finished report.

    `show` hears how far it has come; `checkpoint` gets a partial report after each choice, way and memory.
    Raises ConfigError for a text shorter than the history it should fill, before anything is measured.
    """
    token_ids = _tokens(bench)
    report = Report("quality", _settings(bench, len(token_ids)), machine_facts())
    for results in _measured(bench, token_ids, Work(bench.work, show)):
        report = replace(report, results=report.results | results)
        checkpoint(report)
    return replace(report, gates=all_gates(report.results), finished_at=now())


def all_gates(results: dict[str, Any]) -> tuple[Gate, ...]:
    """Those of the parts that were measured."""
    gates: tuple[Gate, ...] = ()
    if "choices" in results:
        gates += quality_gates(results)
    if "memory" in results:
        gates += memory_gates(results["memory"])
    if "recall" in results:
        gates += recall_gates(results["recall"])
    if "peer" in results:
        gates += peer_gates(results["peer"])
    return gates


def _measured(bench: QualityBench, token_ids: list[int], work: Work) -> Iterator[dict[str, Any]]:
    model, config = bench.model, bench.config
    if bench.choices is not None:
        yield from quality_choices.measure(model, config, bench.choices, work)
    if bench.memory is not None:
        for memory in quality_memory.measure(model, config, bench.memory, token_ids, work):
            yield {"memory": memory}
    if bench.recall is not None:
        for recall in quality_recall.measure(model, config, bench.recall, token_ids, work):
            yield {"recall": recall}
    if bench.peer is not None:
        for peer in quality_peer.measure(model, config, bench.peer, work):
            yield {"peer": peer}


def _tokens(bench: QualityBench) -> list[int]:
    """The long text in tokens; none where no part reads it."""
    if bench.memory is None and bench.recall is None:
        return []
    small = replace(bench.config, cache=CacheConfig(sink=0, window=1), capacity=1)
    with Runtime.open(bench.model, small) as runtime:
        token_ids = runtime.tokenizer.encode(bench.text.text, special=False)
    needed = bench.memory.history_tokens if bench.memory is not None else 1
    if len(token_ids) < needed:
        raise ConfigError(
            f"history-tokens is {needed:,}, and the text has only {len(token_ids):,} tokens; "
            "ask for less, or give a longer text with --text FILE"
        )
    return token_ids


def _settings(bench: QualityBench, text_tokens: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"model": public_name(bench.model), "engine": asdict(bench.config)}
    if bench.choices is not None:
        settings["choices"] = bench.choices.settings
    if bench.peer is not None:
        settings["peer"] = bench.peer.settings
    if text_tokens:
        settings["text"] = {**bench.text.facts, "tokens": text_tokens}
    for name, part in (("memory", bench.memory), ("recall", bench.recall)):
        if part is not None:
            settings[name] = asdict(part)
    return settings

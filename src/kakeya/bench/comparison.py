"""`kakeya bench peers`: the engine and one conversation beside llama.cpp and transformers, in one report."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kakeya.bench import engine, turns
from kakeya.bench.comparison_results import comparison_rows
from kakeya.bench.engine import EngineBench
from kakeya.bench.peers import require_peer
from kakeya.bench.report import Report, now
from kakeya.bench.turns import TurnsBench
from kakeya.bench.turns_talk import Progress

Checkpoint = Callable[[Report], object]
# How much of the run the engine's part is, for the progress bar: about half, by measurement.
_ENGINE_SHARE = 0.5


@dataclass(frozen=True)
class PeersBench:
    """The two benchmarks, both with peers. Raises ConfigError when one of them is not there."""

    engine: EngineBench
    turns: TurnsBench

    def __post_init__(self) -> None:
        require_peer(self.turns.model_path)


def run(bench: PeersBench, progress: Progress, checkpoint: Checkpoint) -> Report:
    """Measure the engine, then talk, and return the finished report.

    Each part interleaves the sides by itself. `checkpoint` gets partial reports. Raises what the parts raise.
    """
    parts: dict[str, Report] = {}

    def so_far(name: str, part: Report) -> Report:
        return _combined({**parts, name: part})

    parts["engine"] = engine.run(
        bench.engine,
        _announcing(bench.engine.pieces_of_work, progress),
        lambda part: checkpoint(so_far("engine", part)),
    )
    parts["turns"] = turns.run(
        bench.turns,
        lambda done, work: progress(_ENGINE_SHARE + (1 - _ENGINE_SHARE) * done, work),
        lambda part: checkpoint(so_far("turns", part)),
    )
    return replace(_combined(parts), finished_at=now())


def _announcing(pieces: int, progress: Progress) -> Callable[[str], None]:
    """Announcements of pieces of work as progress."""
    announced = 0

    def announce(work: str) -> None:
        nonlocal announced
        progress(_ENGINE_SHARE * announced / pieces, work)
        announced += 1

    return announce


def _combined(parts: dict[str, Report]) -> Report:
    """One report of what there is, unfinished."""
    first = parts["engine"]
    results: dict[str, Any] = {name: part.results for name, part in parts.items()}
    if "turns" in parts:
        results["comparison"] = comparison_rows(results["engine"], results["turns"])
    return Report(
        "peers",
        {name: part.config for name, part in parts.items()},
        first.machine,
        results,
        tuple(
            replace(gate, name=f"{name}: {gate.name}") for name, part in parts.items() for gate in part.gates
        ),
        first.started_at,
    )

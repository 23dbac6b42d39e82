"""`kakeya bench http-session`: one conversation over chat completions, with and without matching."""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kakeya.bench.http_session_results import http_session_gates, http_session_results
from kakeya.bench.machine import machine_facts, public_name
from kakeya.bench.report import Report, now
from kakeya.bench.session_results import TAIL_LIMIT
from kakeya.bench.turns import TalkPlan, TurnsBench, held_talk, opened_cast, served_facts
from kakeya.bench.turns_results import MATCHED, UNMATCHED
from kakeya.bench.turns_talk import Ends, Progress, Talk
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError

Checkpoint = Callable[[Report], object]


@dataclass(frozen=True)
class HttpSessionBench:
    """What to say, how often, until when. Whichever end comes first ends the run. Raises ConfigError."""

    model: str
    config: EngineConfig
    ends: Ends = field(default_factory=lambda: Ends(turns=100))
    max_tokens: int = 64
    message_tokens: int = 64
    seed: int = 0
    checkpoint_every_s: float = 600.0
    limit: float = TAIL_LIMIT

    def __post_init__(self) -> None:
        for name in ("max_tokens", "message_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        if self.checkpoint_every_s <= 0:
            raise ConfigError(f"partial-checkpoint-every-s must be above 0, got {self.checkpoint_every_s}")

    def cast(self) -> TurnsBench:
        """Who takes part: two servers of ours, the same but for matching."""
        return TurnsBench(
            self.model,
            "",
            self.config,
            ways=(MATCHED, UNMATCHED),
            llama=False,
            max_tokens=self.max_tokens,
            message_tokens=self.message_tokens,
        )


def run(bench: HttpSessionBench, progress: Progress, checkpoint: Checkpoint) -> Report:
    """Talk until the end, or until SIGINT or SIGTERM, and return the finished report.

    `progress` is told how far the run is, 0 to 1, and `checkpoint` gets partial reports now and then. A turn
    that fails is recorded, and the run goes on. Raises ConfigError when a server cannot start, and
    RemoteError when one does not answer at all.
    """
    return asyncio.run(_run(bench, progress, checkpoint))


async def _run(bench: HttpSessionBench, progress: Progress, checkpoint: Checkpoint) -> Report:
    progress(0.0, "starting")
    async with opened_cast(bench.cast()) as cast:
        settings = {**asdict(replace(bench, model=public_name(bench.model))), **served_facts(cast.info)}
        report = Report("http-session", settings, machine_facts())

        def conclude(talk: Talk) -> dict[str, Any]:
            return http_session_results(talk.turns, talk.elapsed_s, bench.message_tokens, cast.slab_tokens)

        results = await held_talk(
            cast,
            TalkPlan(bench.message_tokens, bench.seed, bench.ends, bench.checkpoint_every_s),
            progress,
            conclude,
            lambda partial: checkpoint(replace(report, results=partial)),
        )
    gates = http_session_gates(results, bench.limit)
    return replace(report, results=results, gates=gates, finished_at=now())

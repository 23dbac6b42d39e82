"""What `bench overhead` concludes: how much of the engine's speed each front end keeps. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kakeya.bench.gates import BYSTANDERS_LIMIT, Gate, at_least, at_most
from kakeya.bench.stats import Samples, ratio_of_medians

ENGINE, GRPC, HTTP = "engine", "gRPC", "HTTP"
# A turn goes on from a history that is computed already; a request begins with nothing, prompt and all.
TURN, REQUEST = "turn", "request"
KEPT_LIMIT = 0.95

# Who can do which work: completions over HTTP know no session that could hold a history.
FRONT_ENDS = ((GRPC, TURN), (GRPC, REQUEST), (HTTP, REQUEST))
# A request over gRPC opens and closes a session besides, by calls that an agent makes once in its life: its
# row is there to be seen, and is not judged.
JUDGED = ((GRPC, TURN), (HTTP, REQUEST))

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Timing:
    """One repetition: all streams together, from the first call to the last token."""

    tokens: int
    seconds: float

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


Timings = Mapping[tuple[str, str], Sequence[Timing]]


def overhead_rows(timings: Timings) -> list[dict[str, Any]]:
    """Each front end at each work it can do, beside the engine called directly."""
    return [_row(front_end, work, timings) for front_end, work in FRONT_ENDS]


def _row(front_end: str, work: str, timings: Timings) -> dict[str, Any]:
    theirs = [timing.speed for timing in timings.get((front_end, work), ())]
    engine = [timing.speed for timing in timings.get((ENGINE, work), ())]
    return {
        "front_end": front_end,
        "work": work,
        "tokens_per_second": Samples(tuple(theirs)).to_dict(),
        "engine_tokens_per_second": Samples(tuple(engine)).to_dict(),
        "kept": ratio_of_medians(theirs, engine),
    }


def overhead_gates(results: Row, limit: float) -> tuple[Gate, ...]:
    """Each front end must keep `limit` of the engine's speed at its own kind of work; judged only on a quiet
    machine."""
    others, absent = results["bystanders_share"], results["absent"]
    quiet = others is None or others <= BYSTANDERS_LIMIT
    busy = None if quiet else f"others used {others:.0%} of the machine, so ratios mean nothing"
    untold = "this system does not tell how busy it is"
    kept = [
        at_least(
            f"{row['front_end']} over the engine, {row['work']}",
            row["kept"] if quiet else None,
            limit,
            absent=busy or absent.get(row["front_end"], "not measured in this run"),
        )
        for row in results["front_ends"]
        if (row["front_end"], row["work"]) in JUDGED
    ]
    return (*kept, at_most("share of the machine that others used", others, BYSTANDERS_LIMIT, absent=untold))

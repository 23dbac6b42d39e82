"""What `bench engine` concludes from its measurements: results and gates. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kakeya.bench.gates import BYSTANDERS_LIMIT, Gate, at_least, at_most
from kakeya.bench.plan import CHOICES, GREEDY, Case, DecodeCase, PromptCase, SampledCase, Speeds
from kakeya.bench.stats import Samples, median_of_ratios, ratio, ratio_of_medians

OURS, PEER = "kakeya", "llama.cpp"


@dataclass(frozen=True)
class Targets:
    """How many times the peer's speed: prompts by tokens, decoding by (sessions, history)."""

    prompts: Mapping[int, float]
    decodes: Mapping[tuple[int, int], float]


# The default model is small, 4 bits throughout; other files are larger and mix their formats.
DEFAULT_MODEL_TARGETS = Targets(
    {128: 3.0, 512: 3.0}, {(1, 64): 1.25, (1, 4096): 2.0, (1, 16384): 3.0, (16, 64): 2.5, (16, 1024): 2.5}
)
FILE_TARGETS = Targets(
    {512: 2.0}, {(1, 64): 1.2, (1, 4096): 1.5, (1, 16384): 3.0, (16, 64): 2.5, (16, 1024): 2.5}
)
# Sessions that sample at this history, and what they keep of greedy decoding's speed.
SAMPLED_SESSIONS, SAMPLED_HISTORY = (1, 16, 32), 64
SAMPLED_LIMIT = 0.97
FLAT_HISTORIES = (2048, 16384)
FLAT_LIMIT = 0.97
MEMORY_LIMIT = 1.01
START_LIMIT_SECONDS = 5.0
FIRST_TOKEN_LIMIT_SECONDS = 1.0
# What we may use of one core while the peer is timed.
QUIET_LIMIT = 0.05

NOT_MEASURED = "not measured in this run"
NO_PEER = "no peer in this run: use --peers"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Memory:
    """Resident bytes of this process before the work begins, and what the KV pool takes of them."""

    before_open: int
    after_open: int
    after_warm_up: int
    pool: int


@dataclass(frozen=True)
class Startup:
    """Fresh processes, timed from launch to a loaded model, and from there to the first token."""

    ready_seconds: tuple[float, ...]
    first_token_seconds: tuple[float, ...]


def speed_results(cases: Sequence[Case], speeds: Speeds) -> dict[str, Any]:
    """Every measured case with both sides' samples and the ratio of their medians."""
    measured = [case for case in cases if (OURS, case) in speeds]
    prompts = [{"tokens": c.tokens, **_sides(c, speeds)} for c in measured if isinstance(c, PromptCase)]
    decodes = [
        {"sessions": c.sessions, "history": c.history, **_sides(c, speeds)}
        for c in measured
        if isinstance(c, DecodeCase)
    ]
    decodes.sort(
        key=lambda row: (row["history"] if row["sessions"] > 1 else 0, row["sessions"], row["history"])
    )
    return {"prompt": prompts, "decode": decodes}


def _sides(case: Case, speeds: Speeds) -> dict[str, Any]:
    ours, theirs = speeds[OURS, case], speeds.get((PEER, case))
    return {
        "tokens_per_second": Samples(tuple(ours)).to_dict(),
        "peer_tokens_per_second": None if theirs is None else Samples(tuple(theirs)).to_dict(),
        "ratio": None if theirs is None else ratio_of_medians(ours, theirs),
    }


def sampled_results(cases: Sequence[SampledCase], speeds: Speeds) -> list[dict[str, Any]]:
    """Every measured way of choosing tokens, and what it keeps of greedy decoding's speed."""
    return [
        {
            "sessions": case.sessions,
            "history": case.history,
            "choice": case.choice,
            "tokens_per_second": Samples(tuple(speeds[OURS, case])).to_dict(),
            "of_greedy": median_of_ratios(speeds[OURS, case], speeds[OURS, replace(case, choice=GREEDY)]),
        }
        for case in cases
        if (OURS, case) in speeds
    ]


def memory_results(memory: Memory, *, at_end: int) -> dict[str, Any]:
    """The same with the resident bytes `at_end` of the work, and how much they grew."""
    return {
        "before_open_bytes": memory.before_open,
        "after_open_bytes": memory.after_open,
        "after_warm_up_bytes": memory.after_warm_up,
        "at_end_bytes": at_end,
        "pool_bytes": memory.pool,
        "growth": ratio(at_end, memory.after_warm_up),
    }


def startup_results(startup: Startup) -> dict[str, Any]:
    return {
        "ready_seconds": Samples(startup.ready_seconds).to_dict(),
        "first_token_seconds": Samples(startup.first_token_seconds).to_dict(),
    }


def engine_gates(results: Row, targets: Targets = DEFAULT_MODEL_TARGETS) -> tuple[Gate, ...]:
    """The targets. Ratios are judged only where a peer was measured beside us on a quiet machine."""
    ratios, absent = _ratios(results), NOT_MEASURED
    if results["peer"] is None:
        absent = NO_PEER
    elif busy := _busy(results):
        ratios, absent = {}, busy
    limits: dict[str, float] = {PromptCase(tokens).label: limit for tokens, limit in targets.prompts.items()}
    limits |= {DecodeCase(*shape, steps=0).label: limit for shape, limit in targets.decodes.items()}
    return (
        *(
            at_least(f"{label}, ratio to {PEER}", ratios.get(label), limit, absent=absent)
            for label, limit in limits.items()
        ),
        _flatness_gate(results),
        *_sampling_gates(results),
        *_behaviour_gates(results),
        *_fairness_gates(results),
    )


def _busy(results: Row) -> str | None:
    """Why ratios are not judged, if others took too much of the machine."""
    others = results["bystanders_share"]
    if others is None or others <= BYSTANDERS_LIMIT:
        return None
    return f"others used {others:.0%} of the machine, so ratios mean nothing"


def _ratios(results: Row) -> dict[str, float | None]:
    return {row_label(row): row["ratio"] for row in (*results["prompt"], *results["decode"])}


def row_label(row: Row) -> str:
    """What was measured in a row, in words."""
    if "tokens" in row:
        return PromptCase(row["tokens"]).label
    if "choice" in row:
        return SampledCase(row["sessions"], row["history"], 0, row["choice"]).label
    return DecodeCase(row["sessions"], row["history"], steps=0).label


def decode_row(results: Row, sessions: int, history: int) -> Row | None:
    """The decode case measured for so many sessions at that history."""
    rows: Sequence[Row] = results["decode"]
    return next((row for row in rows if (row["sessions"], row["history"]) == (sessions, history)), None)


def median_of(row: Row | None, what: str = "tokens_per_second") -> float | None:
    """The median of one of a row's measurements; None where the row or the measurement is missing."""
    samples = row[what] if row else None
    value: float | None = samples["median"] if samples else None
    return value


def _flatness_gate(results: Row) -> Gate:
    near, far = FLAT_HISTORIES
    value = ratio(median_of(decode_row(results, 1, far)), median_of(decode_row(results, 1, near)))
    name = f"decode speed at history {far:,} over {near:,}"
    return at_least(name, value, FLAT_LIMIT, absent="both histories must be measured")


def _sampling_gates(results: Row) -> list[Gate]:
    busy = _busy(results)
    kept = {} if busy else {row_label(row): row["of_greedy"] for row in results["sampled"]}
    labels = [
        SampledCase(sessions, SAMPLED_HISTORY, 0, choice).label
        for sessions in SAMPLED_SESSIONS
        for choice in CHOICES
        if choice != GREEDY
    ]
    return [
        at_least(
            f"{label}, part of greedy's speed", kept.get(label), SAMPLED_LIMIT, absent=busy or NOT_MEASURED
        )
        for label in labels
    ]


def _behaviour_gates(results: Row) -> list[Gate]:
    growth, startup = results["memory"]["growth"], results["startup"]
    ready, first = median_of(startup, "ready_seconds"), median_of(startup, "first_token_seconds")
    return [
        at_most("resident memory, end over warm-up", growth, MEMORY_LIMIT, absent=NOT_MEASURED),
        _peer_memory_gate(results),
        at_most("seconds from launch to a loaded model", ready, START_LIMIT_SECONDS, absent=NOT_MEASURED),
        at_most(
            "seconds from there to the first token", first, FIRST_TOKEN_LIMIT_SECONDS, absent=NOT_MEASURED
        ),
    ]


def _peer_memory_gate(results: Row) -> Gate:
    """With one session each: more of them take more of ours, which is there from the start."""
    peer, alone = results["peer"], all(row["sessions"] == 1 for row in results["decode"])
    theirs = peer.get("resident_bytes") if peer else None
    value = ratio(results["memory"]["at_end_bytes"], theirs) if alone else None
    absent = NO_PEER if peer is None else "judged with one session each: use --most-sessions 1"
    return at_most(f"resident memory over {PEER}'s", value, 1.0, absent=absent)


def _fairness_gates(results: Row) -> list[Gate]:
    """A busy machine slows one side more than the other."""
    peer, others = results["peer"], results["bystanders_share"]
    share = peer["our_cpu_share"] if peer else None
    untold = "this system does not tell how busy it is"
    return [
        at_most("our share of one core while the peer is timed", share, QUIET_LIMIT, absent=NO_PEER),
        at_most("share of the machine that others used", others, BYSTANDERS_LIMIT, absent=untold),
    ]

"""What `bench capacity` concludes from its agents: a row for each level, a summary and gates. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kakeya.bench.gates import Gate, at_least, at_most
from kakeya.bench.stats import percentile, ratio

RSS_LIMIT = 1.10
# Solo outputs that are all alike could not tell one agent's output from another's.
DISTINCT_NEEDED = 0.5
ALL_LEVELS = "all levels were run"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class AgentRun:
    """How one agent fared at one level; what it did not come to is None.

    `correct`: its output is that of its solo run. An error names where it happened: create, fill or turn.
    """

    agent: int
    create_s: float | None = None
    generate_s: float | None = None
    generated: int = 0
    correct: bool | None = None
    kv_live_bytes: int | None = None
    error_phase: str | None = None
    error_class: str | None = None
    error_str: str | None = None


@dataclass(frozen=True)
class LevelTimes:
    """Seconds of a level's parts, each from its first agent's start to its last agent's end."""

    create: float
    fill: float
    turn: float
    wall: float


def level_row(level: int, agents: Sequence[AgentRun], times: LevelTimes, rss: int | None) -> dict[str, Any]:
    """One level in numbers."""
    errors = Counter(run.error_class for run in agents if run.error_class is not None)
    generated = sum(run.generated for run in agents)
    kept = [run.kv_live_bytes for run in agents if run.kv_live_bytes is not None]
    return {
        "level": level,
        "created_ok": sum(run.create_s is not None for run in agents),
        "generate_ok": sum(run.generate_s is not None for run in agents),
        "wrong_outputs": sum(run.correct is False for run in agents),
        "errors": dict(errors),
        "first_errors": _first_errors(agents),
        **_latency("create", [run.create_s for run in agents]),
        **_latency("generate", [run.generate_s for run in agents]),
        "tokens_per_s": ratio(generated, times.turn),
        "per_session_kv_bytes": max(kept, default=None),
        "server_rss_bytes": rss,
        "create_wall_s": times.create,
        "fill_wall_s": times.fill,
        "turn_wall_s": times.turn,
        "wall_s": times.wall,
    }


def _latency(name: str, seconds: Sequence[float | None]) -> dict[str, float | None]:
    known = [value for value in seconds if value is not None]
    return {f"{name}_p50_s": percentile(known, 50), f"{name}_p95_s": percentile(known, 95)}


def _first_errors(agents: Sequence[AgentRun]) -> list[dict[str, Any]]:
    """One example of each class of error."""
    examples: dict[str, dict[str, Any]] = {}
    for run in agents:
        if run.error_class is not None and run.error_class not in examples:
            examples[run.error_class] = {
                "class": run.error_class,
                "phase": run.error_phase,
                "agent": run.agent,
                "message": run.error_str,
            }
    return list(examples.values())


def is_clean(row: Row) -> bool:
    """Whether every agent of a level got a session and the right output."""
    return bool(row["generate_ok"] == row["level"] and not row["wrong_outputs"] and not row["errors"])


def stopped_by(row: Row) -> str | None:
    """Why the ramp should not go on after this level; None when it should."""
    if is_clean(row):
        return None
    errors = ", ".join(f"{count} {name}" for name, count in sorted(row["errors"].items()))
    reasons = [f"{row['wrong_outputs']} wrong outputs"] if row["wrong_outputs"] else []
    reasons += [f"errors: {errors}"] if errors else []
    return f"level {row['level']}: {'; '.join(reasons) or 'agents without an output'}"


@dataclass(frozen=True)
class Announced:
    """What the server says its sessions may cost, and what the machine has."""

    capacity: int
    kv_bytes_per_session: int
    memory_bytes: int
    rss_when_ready: int | None

    @property
    def node_kv_upper_bound(self) -> int:
        return self.capacity * self.kv_bytes_per_session


def capacity_summary(
    rows: Sequence[Row],
    announced: Announced,
    peak_rss: int | None,
    solo: Sequence[Sequence[int]],
    stopped: str,
) -> dict[str, Any]:
    """The ramp in numbers. `solo` are the outputs that agents were compared with."""
    kept = [row["per_session_kv_bytes"] for row in rows if row["per_session_kv_bytes"] is not None]
    bound = announced.node_kv_upper_bound
    return {
        "levels_run": len(rows),
        "max_concurrent_agents_clean": max((row["level"] for row in rows if is_clean(row)), default=0),
        "outputs_checked": sum(row["generate_ok"] for row in rows),
        "wrong_outputs": sum(row["wrong_outputs"] for row in rows),
        "errors": sum(sum(row["errors"].values()) for row in rows),
        "distinct_solo_outputs": len({tuple(tokens) for tokens in solo}),
        "solo_outputs": len(solo),
        "per_session_kv_bytes": max(kept, default=None),
        "announced_kv_bytes_per_session": announced.kv_bytes_per_session,
        "node_kv_upper_bound": bound,
        "node_kv_share_of_memory": ratio(bound, announced.memory_bytes),
        "server_rss_when_ready": announced.rss_when_ready,
        "server_peak_rss": peak_rss,
        "peak_over_ready": ratio(peak_rss, announced.rss_when_ready),
        "stopped_by": stopped,
    }


def capacity_gates(summary: Row, levels: Sequence[int], rss_limit: float) -> tuple[Gate, ...]:
    """All levels clean, every output right, and memory as announced."""
    nobody = "no agent got an output"
    checked = summary["outputs_checked"]
    kept = ratio(summary["per_session_kv_bytes"], summary["announced_kv_bytes_per_session"])
    errors = float(summary["errors"]) if summary["levels_run"] else None
    clean = float(summary["max_concurrent_agents_clean"])
    unseen = "the server's memory was not seen"
    return (
        at_least("agents at once, all clean", clean, max(levels), absent=nobody),
        at_most("errors", errors, 0, absent="no level was run"),
        _wrong_gate(summary, checked),
        at_most("KV bytes of a session over the announced ones", kept, 1.0, absent=nobody),
        at_most(
            "server memory, peak over when it was ready", summary["peak_over_ready"], rss_limit, absent=unseen
        ),
    )


def _wrong_gate(summary: Row, checked: int) -> Gate:
    """Judged only when outputs differ enough from agent to agent for a mix-up to be seen."""
    name, wrong = "wrong outputs", float(summary["wrong_outputs"])
    distinct, solo = summary["distinct_solo_outputs"], summary["solo_outputs"]
    if not checked:
        return at_most(name, None, 0, absent="no output was checked")
    if not wrong and solo > 1 and distinct < DISTINCT_NEEDED * solo:
        alike = f"only {distinct} of {solo} solo outputs are distinct, so a mix-up could not be seen"
        return at_most(name, None, 0, absent=alike)
    return at_most(name, wrong, 0, absent="")

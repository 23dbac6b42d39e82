"""What `bench session` concludes from its turns: aggregate and gates. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kakeya.bench.gates import BYSTANDERS_LIMIT, Gate, at_most
from kakeya.bench.stats import percentile, ratio, slope

KV_LIMIT = 0.10
TAIL_LIMIT = 1.05
RSS_LIMIT = 1.01
# How many turns make the head and the tail of a run, and how many there must be at all.
ENDS = 50
TURNS_NEEDED = 10
# From this turn on the server has everything it needs, so that its memory is at rest.
SETTLED_TURN = 20
# Of so many samples the median is taken at the end: one spike or one late give-back does not move it.
RSS_TAIL = 20
# A spread of fewer would be 0 whatever they held.
PLATEAU_TURNS_NEEDED = 2
BUCKET_SECONDS = 600.0

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Turn:
    """One turn as it was seen by the client; without `error_class` it went well.

    `latency_s` runs from the message's text to the last token, `ttft_s` to the first one.
    The rest is what the session and the server's process held afterwards.
    """

    t_relative_s: float
    user_message_tokens: int
    latency_s: float | None = None
    ttft_s: float | None = None
    n_emitted: int | None = None
    kv_live_bytes: int | None = None
    history_length: int | None = None
    dropped_token_count: int | None = None
    server_rss_bytes: int | None = None
    error_class: str | None = None
    error_str: str | None = None

    @property
    def ok(self) -> bool:
        return self.error_class is None

    def to_dict(self) -> dict[str, Any]:
        """What applies to it: the measurements, or the error."""
        known = {name: value for name, value in asdict(self).items() if value is not None}
        return {"ok": self.ok, **known}


@dataclass(frozen=True)
class Limits:
    """What the gates ask for."""

    kv: float = KV_LIMIT
    tail: float = TAIL_LIMIT
    rss: float = RSS_LIMIT


def aggregate(turns: Sequence[Turn], duration_s: float) -> dict[str, Any]:
    """The run in numbers; None stands where there was nothing to measure."""
    good = [turn for turn in turns if turn.ok]
    kept = _numbers(good, "kv_live_bytes")
    head, tail = ends(good)
    drift = None if head is None or tail is None else tail - head
    return {
        "n_turns": len(good),
        "n_errors": len(turns) - len(good),
        "duration_s": duration_s,
        **_latencies(good),
        "kv_live_bytes": {
            "min": min(kept, default=None),
            "mean": sum(kept) / len(kept) if kept else None,
            "max": max(kept, default=None),
        },
        "kv_spread_after_plateau": kv_spread(good),
        "history_length": max(_numbers(good, "history_length"), default=None),
        "head_latency_p50_s": head,
        "tail_latency_p50_s": tail,
        "latency_drift_p50_s": drift,
        "tail_over_head": ratio(tail, head),
        "server_rss": rss_results(good),
        "buckets_10min": buckets(turns),
    }


def _latencies(good: Sequence[Turn]) -> dict[str, float | None]:
    latency, ttft = _numbers(good, "latency_s"), _numbers(good, "ttft_s")
    return {
        "latency_p50_s": percentile(latency, 50),
        "latency_p95_s": percentile(latency, 95),
        "ttft_p50_s": percentile(ttft, 50),
        "ttft_p95_s": percentile(ttft, 95),
    }


def _numbers(turns: Sequence[Turn], name: str) -> list[float]:
    values = (getattr(turn, name) for turn in turns)
    return [value for value in values if value is not None]


def ends(good: Sequence[Turn]) -> tuple[float | None, float | None]:
    """Median latency of the first and the last 50 turns, fewer on short runs; None under 10 turns."""
    if len(good) < TURNS_NEEDED:
        return None, None
    count = min(ENDS, len(good) // 2)
    latency = _numbers(good, "latency_s")
    return percentile(latency[:count], 50), percentile(latency[-count:], 50)


def kv_spread(good: Sequence[Turn]) -> float | None:
    """(max − min) / max of the live bytes once tokens have left the window; None under 2 such turns."""
    kept = _numbers(_past_plateau(good), "kv_live_bytes")
    if len(kept) < PLATEAU_TURNS_NEEDED or not any(kept):
        return None
    return (max(kept) - min(kept)) / max(kept)


def _past_plateau(good: Sequence[Turn]) -> list[Turn]:
    return [turn for turn in good if turn.dropped_token_count]


def rss_results(good: Sequence[Turn]) -> dict[str, float | None]:
    """The server's resident memory once it has settled: ends, peak, growth and slope.

    The tail is the median of the last 20 samples after the settled one, fewer on short runs.
    """
    seen = [turn for turn in good if turn.server_rss_bytes is not None][SETTLED_TURN - 1 :]
    points = [(turn.t_relative_s, float(turn.server_rss_bytes or 0)) for turn in seen]
    first, last = (points[0][1], points[-1][1]) if len(points) > 1 else (None, None)
    sizes = [size for _, size in points]
    return {
        "settled_bytes": first,
        "last_bytes": last,
        "last_over_settled": ratio(last, first),
        "peak_over_settled": ratio(max(sizes, default=None), first),
        "tail_over_settled": ratio(percentile(sizes[1:][-RSS_TAIL:], 50), first),
        "slope_bytes_per_s": slope(points),
    }


def buckets(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The run in stretches of ten minutes, by when turns began; empty stretches included."""
    count = 1 + int(max((turn.t_relative_s for turn in turns), default=0.0) // BUCKET_SECONDS)
    members: list[list[Turn]] = [[] for _ in range(count if turns else 0)]
    for turn in turns:
        members[int(turn.t_relative_s // BUCKET_SECONDS)].append(turn)
    return [_bucket(place, inside) for place, inside in enumerate(members)]


def _bucket(place: int, turns: Sequence[Turn]) -> dict[str, Any]:
    good = [turn for turn in turns if turn.ok]
    return {
        "from_s": place * BUCKET_SECONDS,
        "n_turns": len(good),
        "n_errors": len(turns) - len(good),
        **_latencies(good),
        "kv_live_bytes_max": max(_numbers(good, "kv_live_bytes"), default=None),
        "history_length": max(_numbers(good, "history_length"), default=None),
        "server_rss_bytes_max": max(_numbers(good, "server_rss_bytes"), default=None),
    }


def session_gates(
    turns: Sequence[Turn], summary: Row, limits: Limits, others: float | None
) -> tuple[Gate, ...]:
    """Bounded memory, bounded turns, and no turn that failed. `others` used that share of the machine."""
    unseen = f"the server's memory was not seen in more than {SETTLED_TURN} turns"
    errors = float(summary["n_errors"]) if turns else None
    return (
        _kv_gate(turns, summary, limits.kv),
        prefill_gate(summary, limits.tail, others),
        at_most("rss_bounded", summary["server_rss"]["tail_over_settled"], limits.rss, absent=unseen),
        at_most("errors", errors, 0, absent="there was no turn"),
    )


def prefill_gate(summary: Row, limit: float, others: float | None) -> Gate:
    """The last turns may take `limit` of the first ones; judged unless the machine is known to be busy."""
    value = summary["tail_over_head"]
    absent = f"{summary['n_turns']} turns went well; {TURNS_NEEDED} are needed"
    if others is not None and others > BYSTANDERS_LIMIT:
        value, absent = None, f"others used {others:.0%} of the machine, so ratios mean nothing"
    return at_most("prefill_bounded", value, limit, absent=absent)


def _kv_gate(turns: Sequence[Turn], summary: Row, limit: float) -> Gate:
    good = [turn for turn in turns if turn.ok]
    past = _past_plateau(good)
    kept = _numbers(past or good, "kv_live_bytes")
    if kept and not any(kept):
        zeros = "kv_live_bytes is 0 in every turn: nothing was held, or nothing was measured"
        return Gate("kv_bounded", 0.0, "at most", limit, False, zeros)
    absent = "the window never filled" if good else "no turn went well"
    if past:
        absent = f"the window was full in fewer than {PLATEAU_TURNS_NEEDED} turns"
    return at_most("kv_bounded", summary["kv_spread_after_plateau"], limit, absent=absent)


def session_results(
    turns: Sequence[Turn], duration_s: float, limits: Limits, others: float | None
) -> tuple[dict[str, Any], tuple[Gate, ...]]:
    """The aggregate with the verdicts in it, and the gates themselves.

    `others` is the share of the machine that they used; None when it is not known.
    """
    summary = aggregate(turns, duration_s)
    gates = session_gates(turns, summary, limits, others)
    verdicts = {gate.name: gate.passed for gate in gates if gate.name.endswith("_bounded")}
    results = {
        "bystanders_share": others,
        "aggregate": {**summary, **verdicts},
        "turns": [turn.to_dict() for turn in turns],
    }
    return results, gates

"""What `bench http-session` concludes: the two ways of holding a conversation, each like a session. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from kakeya.bench.gates import Gate, at_most
from kakeya.bench.session_results import TAIL_LIMIT, Turn as SessionTurn, aggregate, prefill_gate
from kakeya.bench.stats import ratio
from kakeya.bench.turns_results import MATCHED, UNMATCHED, Turn, Turns, turns_results

# What a client over HTTP does not see.
_UNSEEN = ("kv_live_bytes", "kv_spread_after_plateau", "server_rss")

Row = Mapping[str, Any]


def as_session_turn(turn: Turn, message_tokens: int) -> SessionTurn:
    """The same turn as `bench session` records it."""
    answer = turn.answer
    if answer is None:
        return SessionTurn(
            turn.t_relative_s, message_tokens, error_class=turn.error_class, error_str=turn.error_str
        )
    return SessionTurn(
        turn.t_relative_s,
        message_tokens,
        latency_s=answer.latency_s,
        ttft_s=answer.ttft_s,
        n_emitted=answer.answer_tokens,
        history_length=answer.history_tokens,
        dropped_token_count=answer.dropped_tokens,
    )


def http_session_results(
    turns: Turns, duration_s: float, message_tokens: int, slab_tokens: int
) -> dict[str, Any]:
    """Both sides with their turns and aggregates, and how they compare at the end."""
    rows = [
        {**row, "aggregate": _aggregate(turns[row["contestant"]], duration_s, message_tokens)}
        for row in turns_results(turns, slab_tokens)
    ]
    return {"contestants": rows, "unmatched_over_matched": _compared(rows)}


def _aggregate(turns: Sequence[Turn], duration_s: float, message_tokens: int) -> dict[str, Any]:
    whole = aggregate([as_session_turn(turn, message_tokens) for turn in turns], duration_s)
    return {name: value for name, value in whole.items() if name not in _UNSEEN}


def _compared(rows: Sequence[Row]) -> dict[str, float | None]:
    sides = {row["contestant"]: row["aggregate"] for row in rows}
    names = ("head_latency_p50_s", "tail_latency_p50_s", "ttft_p50_s", "latency_p50_s")
    return {name: ratio(sides[UNMATCHED][name], sides[MATCHED][name]) for name in names}


def http_session_gates(results: Row, limit: float = TAIL_LIMIT) -> tuple[Gate, ...]:
    """The matched side must stay flat, unless the machine was busy; no turn of either may fail."""
    sides = {row["contestant"]: row["aggregate"] for row in results["contestants"]}
    return (
        prefill_gate(sides[MATCHED], limit, results["bystanders_share"]),
        *(_error_gate(name, side) for name, side in sides.items()),
    )


def _error_gate(name: str, side: Row) -> Gate:
    errors = float(side["n_errors"]) if side["n_turns"] + side["n_errors"] else None
    return at_most(f"{name}: errors", errors, 0, absent="there was no turn")

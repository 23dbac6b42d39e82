"""What the console shows of the runtime: the caller's sessions, their turns and how much room is left."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import kakeya
from kakeya.types import SessionInfo, TurnRecord

if TYPE_CHECKING:
    from kakeya.metrics import Metrics
    from kakeya.runtime import Runtime

# A person does not read more rows than this.
MOST_ROWS = 100
_PAGE_SIZE = 1000
_GENERATED_TOKENS = "kakeya_generation_tokens_total"
_SHOWN_FACTS = ("model", "sink", "window", "capacity", "session_bytes", "pool_bytes")
_SHOWN = (
    "session_id",
    "client_label",
    "state",
    "history_length",
    "sink",
    "window",
    "kv_live_bytes",
    "kv_capacity_bytes",
    "dropped_token_count",
    "idle_seconds",
    "turns",
    "generated_tokens",
    "shared_tokens",
)


def overview(runtime: "Runtime", metrics: "Metrics | None", owner: str) -> dict[str, Any]:
    """The server's facts and the owner's sessions, oldest first: of many, those used most recently.

    Asking does not refresh their idle clocks. Waits for the engine: call it on a worker.
    """
    sessions = list(_all_sessions(runtime, owner))
    recent = {info.session_id for info in sorted(sessions, key=lambda info: info.idle_seconds)[:MOST_ROWS]}
    facts = runtime.describe()
    generated = None if metrics is None else metrics.registry.get_sample_value(_GENERATED_TOKENS)
    return {
        "facts": {
            "version": kakeya.__version__,
            **{name: getattr(facts, name) for name in _SHOWN_FACTS},
            "free_slabs": runtime.free_slabs,
            "asleep": _asleep(runtime, metrics),
            "generated_tokens": generated,
        },
        "session_count": len(sessions),
        "sessions": [_session(info) for info in sessions if info.session_id in recent],
    }


def _asleep(runtime: "Runtime", metrics: "Metrics | None") -> dict[str, Any] | None:
    """How many sessions sleep where, what they take there and how long they take to wake; None where none
    can."""
    tiers = runtime.tiers()
    if tiers is None:
        return None
    shown = {
        name: getattr(tiers, name) for name in ("host", "disk", "host_bytes", "disk_bytes", "lag_tokens")
    }
    return shown | {"wake_seconds": None if metrics is None else metrics.mean_wake_seconds}


def turns(runtime: "Runtime", session_id: str, owner: str) -> dict[str, Any]:
    """The newest turns of a session, oldest first. Raises SessionNotFound."""
    info = runtime.info(session_id, owner=owner)
    first = info.turns - len(info.recent_turns) + 1
    numbered = [_turn(number, turn) for number, turn in enumerate(info.recent_turns, first)]
    return {"session_id": session_id, "turns": numbered}


def _all_sessions(runtime: "Runtime", owner: str) -> Iterator[SessionInfo]:
    token = ""
    while True:
        page, token = runtime.list_sessions(owner=owner, page_size=_PAGE_SIZE, page_token=token)
        yield from page
        if not token:
            return


def _session(info: SessionInfo) -> dict[str, Any]:
    last = _turn(info.turns, info.recent_turns[-1]) if info.recent_turns else None
    recalled = sum(each.length for each in info.recalled)
    return {name: getattr(info, name) for name in _SHOWN} | {"recalled_tokens": recalled, "last_turn": last}


def _turn(number: int, turn: TurnRecord) -> dict[str, Any]:
    return {"number": number} | asdict(turn)

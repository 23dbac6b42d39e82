"""What `bench turns` concludes from the turns of everybody who took part. Pure."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kakeya.bench.gates import BYSTANDERS_LIMIT, Gate, at_most
from kakeya.bench.stats import percentile, ratio

RESPONSES, MATCHED, UNMATCHED = "Responses", "chat matched", "chat unmatched"
LLAMA, TRANSFORMERS = "llama.cpp", "transformers"
# Whose turns must cost the same however long the history, and whose must all succeed.
FLAT = (RESPONSES, MATCHED)
OURS = (*FLAT, UNMATCHED)

FLAT_LIMIT = 1.05
COMPUTED_LIMIT = 1.10
# How many turns make the head and the tail of a run, and how many there must be at all.
ENDS = 20
TURNS_NEEDED = 10

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Answered:
    """One turn that went well: seconds by the client's clock, tokens as the server counts them.

    `prompt_tokens` is the whole history with the new message, `cached_tokens` what of it was not computed
    again, `dropped_tokens` what has left the window. None where a contestant does not tell.
    """

    latency_s: float
    ttft_s: float | None
    prompt_tokens: int
    answer_tokens: int
    cached_tokens: int | None = None
    dropped_tokens: int | None = None

    @property
    def history_tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @property
    def computed_tokens(self) -> int:
        """What of the prompt had to be computed."""
        return self.prompt_tokens - (self.cached_tokens or 0)


@dataclass(frozen=True)
class Turn:
    """The `number`th turn of a conversation, counted from 1: an answer, or an error.

    `stopped` says that the contestant took part no longer after it.
    """

    number: int
    t_relative_s: float
    answer: Answered | None = None
    error_class: str | None = None
    error_str: str | None = None
    stopped: bool = False

    def to_dict(self) -> dict[str, Any]:
        """What applies to it: the measurements, or the error."""
        told = {"turn": self.number, "t_relative_s": self.t_relative_s, "ok": self.answer is not None}
        if self.answer is not None:
            known = {name: value for name, value in asdict(self.answer).items() if value is not None}
            return {**told, **known}
        return {**told, "error_class": self.error_class, "error_str": self.error_str, "stopped": self.stopped}


Turns = Mapping[str, Sequence[Turn]]


def answers(turns: Iterable[Turn]) -> list[Answered]:
    """The turns that went well."""
    return [turn.answer for turn in turns if turn.answer is not None]


def summary(turns: Sequence[Turn], slab_tokens: int) -> dict[str, Any]:
    """One contestant's conversation in numbers; None stands where there was nothing to measure."""
    good = answers(turns)
    last = good[-1] if good else None
    return {
        "n_turns": len(good),
        "n_errors": len(turns) - len(good),
        "stopped": _stop(turns),
        "history_tokens": last.history_tokens if last else None,
        "dropped_tokens": last.dropped_tokens if last else None,
        "mean_answer_tokens": sum(each.answer_tokens for each in good) / len(good) if good else None,
        "latency": ends(good, lambda each: each.latency_s),
        "ttft": ends(good, lambda each: each.ttft_s),
        "computed_tokens": ends(good, lambda each: each.computed_tokens),
        "latency_once_full": ends(once_full(good, slab_tokens), lambda each: each.latency_s),
    }


def _stop(turns: Sequence[Turn]) -> dict[str, Any] | None:
    last = turns[-1] if turns else None
    return {"turn": last.number, "why": last.error_str} if last is not None and last.stopped else None


def once_full(good: Sequence[Answered], slab_tokens: int) -> list[Answered]:
    """The turns that began with more history than a session holds."""
    return [each for each in good if each.prompt_tokens > slab_tokens]


def ends(good: Sequence[Answered], of: Callable[[Answered], float | None]) -> dict[str, Any]:
    """Medians over the first and the last 20 turns, fewer on short runs; None under 10 turns."""
    known = [value for value in map(of, good) if value is not None]
    count = min(ENDS, len(known) // 2) if len(known) >= TURNS_NEEDED else 0
    first, last = percentile(known[:count], 50), percentile(known[len(known) - count :], 50)
    return {"turns": count, "first": first, "last": last, "last_over_first": ratio(last, first)}


def beside(turns: Sequence[Turn], yardstick: Sequence[Turn]) -> float | None:
    """How many times the yardstick's latency, over the last 20 turns that both did well."""
    latency = {turn.number: turn.answer.latency_s for turn in yardstick if turn.answer is not None}
    pairs = [
        (turn.answer.latency_s, latency[turn.number])
        for turn in turns
        if turn.answer is not None and turn.number in latency
    ][-ENDS:]
    return ratio(percentile([theirs for theirs, _ in pairs], 50), percentile([own for _, own in pairs], 50))


def turns_results(turns: Turns, slab_tokens: int) -> list[dict[str, Any]]:
    """One row for each contestant, with all of its turns."""
    yardstick = turns.get(RESPONSES) or turns.get(MATCHED) or ()
    return [
        {
            "contestant": name,
            "summary": {**summary(own, slab_tokens), "times_ours_at_its_end": beside(own, yardstick)},
            "turns": [turn.to_dict() for turn in own],
        }
        for name, own in turns.items()
    ]


def turns_gates(results: Row, limit: float) -> tuple[Gate, ...]:
    """Ours compute only what is new, stay flat once the window is full, and never fail."""
    rows = {row["contestant"]: row["summary"] for row in results["contestants"]}
    others = results["bystanders_share"]
    untold = "this system does not tell how busy it is"
    flat = [rows[name] for name in FLAT if name in rows]
    names = [name for name in FLAT if name in rows]
    return (
        *(_computed_gate(name, row) for name, row in zip(names, flat, strict=True)),
        *(_flat_gate(name, row, others, limit) for name, row in zip(names, flat, strict=True)),
        *(_error_gate(name, rows[name]) for name in OURS if name in rows),
        at_most("share of the machine that others used", others, BYSTANDERS_LIMIT, absent=untold),
    )


def _computed_gate(name: str, row: Row) -> Gate:
    few = f"{row['n_turns']} turns went well; {TURNS_NEEDED} are needed"
    value = row["computed_tokens"]["last_over_first"]
    return at_most(f"{name}: prompt tokens computed, last over first", value, COMPUTED_LIMIT, absent=few)


def _flat_gate(name: str, row: Row, others: float | None, limit: float) -> Gate:
    busy = others is not None and others > BYSTANDERS_LIMIT
    absent = f"fewer than {TURNS_NEEDED} turns began with more history than the window"
    if busy:
        absent = f"others used {others:.0%} of the machine, so latencies mean nothing"
    value = None if busy else row["latency_once_full"]["last_over_first"]
    return at_most(f"{name}: latency once the window is full, last over first", value, limit, absent=absent)


def _error_gate(name: str, row: Row) -> Gate:
    value = float(row["n_errors"]) if row["n_turns"] + row["n_errors"] else None
    return at_most(f"{name}: errors", value, 0, absent="there was no turn")

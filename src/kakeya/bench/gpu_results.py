"""What `bench gpu` concludes: rows, and the gates they are held to. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

from kakeya.bench.gates import Gate, at_least, at_most
from kakeya.bench.stats import Samples, ratio, ratio_of_medians

LARGE, MIDDLE, SMALL = "qwen3-8b", "qwen3-0.6b", "smollm2-135m"

# Milliseconds of a bare step on an H200, by shape and sessions.
STEP_TARGETS = {
    (LARGE, 1): 4.5,
    (LARGE, 64): 7.5,
    (LARGE, 256): 15.5,
    (MIDDLE, 256): 9.0,
    (SMALL, 1): 0.8,
    (SMALL, 256): 2.4,
}
# Where the step must come near what memory allows.
FLOOR_JUDGED = ((LARGE, 1), (LARGE, 64), (LARGE, 256))
HISTORY_JUDGED = ((LARGE, 64), (SMALL, 256))
RUNTIME_JUDGED = ((SMALL, 256), (LARGE, 256))
PEER_JUDGED = ((SMALL, 1), (SMALL, 64))

FLOOR_LIMIT = 0.75
HISTORY_LIMIT = 1.01
PROMPT_LIMIT = 0.5
EXACT_LIMIT = 1.15
RUNTIME_LIMIT = 0.9
MEMORY_LIMIT = 1.01
PEER_LIMIT = 10.0

GREEDY, SEEDED = "greedy", "temperature 0.8, top-p 0.95"
OURS, GENERATE, GENERATE_BATCH = "kakeya", "generate", "generate_batch"

Row = Mapping[str, Any]


class Part(StrEnum):
    """What can be measured by itself. The machine always is: the others are held to it."""

    MACHINE = "machine"
    STEPS = "steps"
    HISTORY = "history"
    PROMPT = "prompt"
    EXACT = "exact"
    RUNTIME = "runtime"
    KERNELS = "kernels"
    TRANSFORMERS = "transformers"
    PARITY = "parity"


def empty_results() -> dict[str, Any]:
    """A table for each part that has one, whether bits are the same, the memory of every shape that was
    opened, and what is absent and why."""
    tables = [part.value for part in Part if part is not Part.MACHINE]
    return {"machine": {}, "seconds": {}} | {name: [] for name in (*tables, "identity", "memory", "absent")}


def step_row(
    shape: str, rows: int, kernels: str, seconds: Sequence[float], floor_seconds: float
) -> dict[str, Any]:
    taken = Samples(tuple(seconds))
    return {
        "shape": shape,
        "rows": rows,
        "kernels": kernels,
        "seconds": taken.to_dict(),
        "floor_seconds": floor_seconds,
        "floor_share": ratio(floor_seconds, taken.median),
        "target_ms": STEP_TARGETS.get((shape, rows)),
    }


def history_row(shape: str, rows: int, seconds: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """`seconds` by position, the nearest one first."""
    (near, near_seconds), (far, far_seconds) = seconds.items()
    return {
        "shape": shape,
        "rows": rows,
        "near": near,
        "far": far,
        "near_seconds": Samples(tuple(near_seconds)).to_dict(),
        "far_seconds": Samples(tuple(far_seconds)).to_dict(),
        "ratio": ratio_of_medians(far_seconds, near_seconds),
    }


def prompt_row(
    shape: str, rows: int, seconds: Sequence[float], flops: int, flops_per_second: float
) -> dict[str, Any]:
    taken = Samples(tuple(seconds))
    speed = ratio(flops, taken.median)
    return {
        "shape": shape,
        "rows": rows,
        "seconds": taken.to_dict(),
        "tokens_per_second": ratio(rows, taken.median),
        "flops_per_second": speed,
        "product_share": ratio(speed, flops_per_second),
    }


def exact_row(shape: str, rows: int, fast: Sequence[float], exact: Sequence[float]) -> dict[str, Any]:
    return {
        "shape": shape,
        "rows": rows,
        "fast_seconds": Samples(tuple(fast)).to_dict(),
        "exact_seconds": Samples(tuple(exact)).to_dict(),
        "ratio": ratio_of_medians(exact, fast),
    }


def runtime_row(
    shape: str,
    sessions: int,
    sampling: str,
    *,
    speeds: Sequence[float | None],
    whole_speeds: Sequence[float],
    step_seconds: Sequence[float],
    prompt_tokens_per_second: float,
    peak_bytes: Sequence[int],
) -> dict[str, Any]:
    """`peak_bytes` of device memory after each repetition; empty where that cannot be told."""
    while_all = Samples(tuple(speed for speed in speeds if speed is not None))
    bare = ratio(sessions, Samples(tuple(step_seconds)).median)
    return {
        "shape": shape,
        "sessions": sessions,
        "sampling": sampling,
        "tokens_per_second": while_all.to_dict(),
        "whole_tokens_per_second": Samples(tuple(whole_speeds)).to_dict(),
        "bare_tokens_per_second": bare,
        "kept": ratio(while_all.median, bare),
        "prompt_tokens_per_second": prompt_tokens_per_second,
        "peak_bytes": list(peak_bytes),
        "memory_growth": ratio(peak_bytes[-1], peak_bytes[0]) if peak_bytes else None,
    }


def kernel_row(
    shape: str,
    operation: str,
    size: str,
    *,
    moved_bytes: int,
    flops: int | None,
    floor_seconds: float,
    seconds: Mapping[str, Sequence[float]],
    captured: Collection[str],
) -> dict[str, Any]:
    """`seconds` of one call by the kernels' name, and which of them were replayed as a graph."""
    timings = {}
    for name, each in seconds.items():
        taken = Samples(tuple(each))
        timings[name] = {
            "seconds": taken.to_dict(),
            "floor_share": ratio(floor_seconds, taken.median),
            "captured": name in captured,
        }
    return {
        "shape": shape,
        "operation": operation,
        "size": size,
        "bytes": moved_bytes,
        "flops": flops,
        "floor_seconds": floor_seconds,
        "timings": timings,
    }


def peer_row(shape: str, sessions: int, method: str, speeds: Sequence[float]) -> dict[str, Any]:
    """Tokens a second of one contender: OURS, or one of their ways."""
    return {
        "shape": shape,
        "sessions": sessions,
        "method": method,
        "tokens_per_second": Samples(tuple(speeds)).to_dict(),
    }


def ours_over(row: Row, rows: Sequence[Row]) -> float | None:
    """Our median among `rows`, for the work of this row of theirs, over the best that they reached."""
    if row["method"] == OURS:
        return None
    work = (row["shape"], row["sessions"], OURS)
    ours = (each for each in rows if (each["shape"], each["sessions"], each["method"]) == work)
    medians = (each["tokens_per_second"]["median"] for each in ours)
    return ratio(next(medians, None), row["tokens_per_second"]["max"])


def memory_share(row: Row) -> float | None:
    """The most that a shape has taken beside its slabs over what was planned; None where nobody can tell."""
    taken = [row["used"][when] for when in ("opened", "stepped") if row["used"][when] is not None]
    return ratio(max(taken, default=None), row["planned"]["total"])


def absence(part: Part, work: str, why: str) -> dict[str, str]:
    """Something that was not measured."""
    return {"part": part.value, "work": work, "why": why}


def gpu_gates(results: Row) -> tuple[Gate, ...]:
    """Every gate there is; those of what was not measured say why they are not judged."""
    return (
        *_step_gates(results),
        *_history_gates(results),
        at_least(
            f"{LARGE}: prompt, share of the product rate",
            _of(results, Part.PROMPT, "product_share", shape=LARGE),
            PROMPT_LIMIT,
            absent=_why(results, Part.PROMPT),
        ),
        at_most(
            f"{LARGE}, 64 sessions: exact step over fast",
            _of(results, Part.EXACT, "ratio", shape=LARGE, rows=64),
            EXACT_LIMIT,
            absent=_why(results, Part.EXACT),
        ),
        _all_true("exact: same bits alone, among others, cut", results, "identity", Part.EXACT),
        *_runtime_gates(results),
        *_peer_gates(results),
        _all_true("greedy tokens equal the CPU engine's", results, "parity", Part.PARITY),
        _memory_gate(results),
    )


def _step_gates(results: Row) -> Iterator[Gate]:
    for (shape, rows), target in STEP_TARGETS.items():
        median = (_of(results, Part.STEPS, "seconds", shape=shape, rows=rows) or {}).get("median")
        milliseconds = None if median is None else 1000 * median
        yield at_most(
            f"{_named(shape, rows)}: step, ms", milliseconds, target, absent=_why(results, Part.STEPS)
        )
    for shape, rows in FLOOR_JUDGED:
        share = _of(results, Part.STEPS, "floor_share", shape=shape, rows=rows)
        yield at_least(
            f"{_named(shape, rows)}: floor over step", share, FLOOR_LIMIT, absent=_why(results, Part.STEPS)
        )


def _history_gates(results: Row) -> Iterator[Gate]:
    for shape, rows in HISTORY_JUDGED:
        yield at_most(
            f"{_named(shape, rows)}: step at 1,000,000 over 2,000",
            _of(results, Part.HISTORY, "ratio", shape=shape, rows=rows),
            HISTORY_LIMIT,
            absent=_why(results, Part.HISTORY),
        )


def _runtime_gates(results: Row) -> Iterator[Gate]:
    why = _why(results, Part.RUNTIME)
    for shape, count in RUNTIME_JUDGED:
        asked = {"shape": shape, "sessions": count, "sampling": GREEDY}
        name = _named(shape, count)
        kept = _of(results, Part.RUNTIME, "kept", **asked)
        yield at_least(f"{name}: runtime over bare steps", kept, RUNTIME_LIMIT, absent=why)
        growth = _of(results, Part.RUNTIME, "memory_growth", **asked)
        yield at_most(f"{name}: device memory, last over first", growth, MEMORY_LIMIT, absent=why)


def _peer_gates(results: Row) -> Iterator[Gate]:
    """Against the best of their ways that was measured."""
    rows = results[Part.TRANSFORMERS]
    for shape, count in PEER_JUDGED:
        same_work = [row for row in rows if (row["shape"], row["sessions"]) == (shape, count)]
        ratios = [over for row in same_work if (over := ours_over(row, rows)) is not None]
        yield at_least(
            f"{_named(shape, count)}: speed over transformers",
            min(ratios, default=None),
            PEER_LIMIT,
            absent=_why(results, Part.TRANSFORMERS),
        )


def _memory_gate(results: Row) -> Gate:
    """Of the shape that comes nearest to what was planned for it, or goes furthest beyond."""
    shares = [share for row in results["memory"] if (share := memory_share(row)) is not None]
    absent = "no shape was opened on a device that tells what it has left"
    return at_most("memory_within_plan", max(shares, default=None), 1.0, absent=absent)


def _all_true(name: str, results: Row, table: str, part: Part) -> Gate:
    rows = results[table]
    share = sum(row["identical"] for row in rows) / len(rows) if rows else None
    return at_least(name, share, 1.0, absent=_why(results, part))


def _named(shape: str, rows: int) -> str:
    return f"{shape}, {counted(rows)}"


def counted(sessions: int) -> str:
    return f"{sessions} session{'' if sessions == 1 else 's'}"


def _of(results: Row, part: Part, value: str, **asked: object) -> Any:
    """A value of the first row that is as asked for; None without one."""
    for row in results[part]:
        if all(row[name] == wanted for name, wanted in asked.items()):
            return row[value]
    return None


def _why(results: Row, part: Part) -> str:
    """Why something of this part may be missing."""
    reasons = dict.fromkeys(each["why"] for each in results["absent"] if each["part"] == part)
    return "; ".join(reasons) or "this shape was not measured in this run"

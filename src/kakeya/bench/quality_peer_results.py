"""What `bench quality --part peer` concludes: our perplexity beside llama.cpp's on the same files. Pure."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kakeya.bench.gates import Gate, at_most
from kakeya.bench.quality_memory_results import perplexity
from kakeya.bench.stats import ratio

# How far the two perplexities may be apart, as a share of llama.cpp's.
APART_LIMIT = 0.005
SCORED_NEEDED = 450


def peer_row(file: str, held_as: str, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """A file that both have read: how much the same tokens surprised each of them, in nats."""
    assert len(ours) == len(theirs), "both score the same tokens"
    our_perplexity, their_perplexity = perplexity(ours), perplexity(theirs)
    return {
        "file": file,
        "held_as": held_as,
        "scored": len(ours),
        "ours": our_perplexity,
        "llama_cpp": their_perplexity,
        "ours_over_llama_cpp": ratio(our_perplexity, their_perplexity),
        "standard_error": standard_error([mine - other for mine, other in zip(ours, theirs, strict=True)]),
    }


def standard_error(differences: Sequence[float]) -> float | None:
    """Of their mean, token by token: how far another text of this length might move the ratio, as a share of
    it. None where there are not two."""
    if len(differences) < 2:
        return None
    return statistics.stdev(differences) / math.sqrt(len(differences))


def peer_gates(results: Mapping[str, Any]) -> tuple[Gate, ...]:
    """For each file the perplexities are about the same, in either direction."""
    return tuple(_gate(row) for row in results["files"])


def _gate(row: Mapping[str, Any]) -> Gate:
    over, scored = row["ours_over_llama_cpp"], row["scored"]
    if scored < SCORED_NEEDED:
        value, absent = None, f"needs {SCORED_NEEDED:,} scored tokens, got {scored:,}"
    else:
        value, absent = None if over is None else abs(over - 1), "a perplexity is no number"
    return at_most(f"{row['file']}: perplexity apart from llama.cpp's", value, APART_LIMIT, absent=absent)

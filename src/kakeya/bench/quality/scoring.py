"""What the parts of `bench quality` share: a runtime for one session, and how much a text surprises it."""

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kakeya.bench.benchmark import Work
from kakeya.config import CacheConfig

if TYPE_CHECKING:
    from kakeya.bench.quality.benchmark import QualityBench
    from kakeya.runtime import Runtime

PASSAGE_TOKENS = 512

# What a part has found so far, by fields of the results.
Found = Iterator[dict[str, Any]]


def open_alone(
    bench: "QualityBench", cache: CacheConfig, model: str | None = None, **changes: Any
) -> "Runtime":
    """A runtime for one session with this memory."""
    from kakeya.runtime import Runtime

    return Runtime.open(model or bench.model, replace(bench.config, cache=cache, capacity=1, **changes))


def surprises(runtime: "Runtime", token_ids: Sequence[int], work: Work) -> list[float]:
    """How much each token but the first surprises the model, in nats, through one session."""
    start = runtime.tokenizer.encode("", bos=True)
    whole = [*start, *token_ids]
    found: list[float] = []
    with closing(runtime.score_blocks(whole)) as blocks:
        for block in blocks:
            following = whole[len(found) + 1 : len(found) + 1 + len(block)]
            logprobs = block[: len(following)].float().log_softmax(dim=-1)
            found += (-logprobs[list(range(len(following))), following]).tolist()
            work.advance(len(block))
    return found[len(start) :]


def perplexity(surprises: Sequence[float]) -> float | None:
    """The exponential of their mean; None where there are none, or where it is no number."""
    mean = math.fsum(surprises) / len(surprises) if surprises else math.inf
    return math.exp(mean) if mean < 700 else None


def cut(token_ids: Sequence[int], size: int) -> list[list[int]]:
    """The text in passages of `size` tokens; the last one may be shorter."""
    return [list(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]

"""Choosing the next token of each row.

A row's logits go through penalties and bias, the mask of a constraint, temperature, top-k, top-p and min-p,
in that order, each filter looking at what the one before left over. One uniform number then picks from what
remains. The number is a function of (seed, position) and of nothing else: there is no generator to keep, and
neither batching, chunking nor speculation can change what is drawn.

This is the definition, in numpy. It runs where the native kernels do not; `cpu/sampler.py` makes those choose
the same tokens.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kakeya.engine.constraint import allows
from kakeya.engine.logits import Floats, Ids, LogProbs, adjusted, leaders, relative, rule_out
from kakeya.errors import StepFailed
from kakeya.types import SamplingParams, TokenEvent


class SampleRequest(NamedTuple):
    """What one row is sampled with: `position` of the token to choose, `recent` tokens for the penalties.

    `mask` has the bits of the tokens that may be chosen, lowest id first, little-endian; None allows all.
    """

    params: SamplingParams
    position: int
    recent: Sequence[int] = ()
    mask: bytes | None = None

    @property
    def is_plain(self) -> bool:
        """Whether logits, seed and position are enough to choose, and the token alone is wanted."""
        return self.mask is None and self.params.is_plain


Sampler = Callable[[torch.Tensor, Sequence[SampleRequest]], list[TokenEvent]]
"""`sample`, or what does the same."""


def sample(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[TokenEvent]:
    """One token for each row of `logits` (float32 [n, vocab], not changed).

    A row's result depends on that row and its request alone. Raises StepFailed if a row's best logit is not
    finite or its mask leaves no token, and InvalidArgument for a token id outside the vocabulary.
    """
    rows = logits.numpy(force=True)  # shares memory on a CPU
    assert len(rows) == len(requests), f"{len(rows)} rows of logits for {len(requests)} requests"
    best = rows.argmax(axis=1)  # a NaN counts as the greatest, so the check below finds it
    _check_finite(rows[np.arange(len(rows)), best])
    return [_sample_row(*each) for each in zip(rows, requests, best.tolist(), strict=True)]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits: Philox with the seed as key and the position as counter."""
    bits = np.random.Philox(key=seed, counter=position).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def _check_finite(best_logits: NDArray[np.float32]) -> None:
    broken = np.flatnonzero(~np.isfinite(best_logits))
    if broken.size:
        row = int(broken[0])
        raise not_finite(float(best_logits[row]), row)


def not_finite(best_logit: float, row: int) -> StepFailed:
    return StepFailed(f"the model's best logit is {best_logit} in row {row}; a finite number is needed")


def _sample_row(row: NDArray[np.float32], request: SampleRequest, best: int) -> TokenEvent:
    params = request.params
    token_id = best if _takes_best(request, best) else _choose(row, request)
    if not params.logprobs and not params.top_logprobs:
        return TokenEvent(token_id)
    distribution = LogProbs(row)
    return TokenEvent(token_id, distribution.of(token_id).logprob, distribution.top(params.top_logprobs))


def _takes_best(request: SampleRequest, best: int) -> bool:
    params = request.params
    if not params.is_greedy or params.has_penalties or params.logit_bias:
        return False
    return request.mask is None or allows(request.mask, best)


def _choose(row: NDArray[np.float32], request: SampleRequest) -> int:
    params = request.params
    logits = adjusted(row, params, request.recent)
    if request.mask is not None:
        rule_out(logits, request.mask)
    if params.is_greedy:
        return int(logits.argmax())
    scores = relative(logits)
    with np.errstate(over="ignore"):  # a tiny temperature sends all but the best to minus infinity
        scores /= params.temperature
    number = uniform(params.seed, request.position)
    kept = _filter(scores, params)
    return _draw(scores, number) if kept is None else int(kept[_draw(scores[kept], number)])


def _filter(scores: Floats, params: SamplingParams) -> Ids | None:
    """The ids that may be chosen, None for all. Never empty: the best, of score 0, passes every filter."""
    kept: Ids | None = None
    if 0 < params.top_k < scores.size:
        kept = leaders(scores, np.ones_like, params.top_k)
        scores = scores[kept]
    if params.top_p < 1.0:
        # The smallest set that holds top_p of what is left: the token that crosses the line is in it.
        nucleus = leaders(scores, np.exp, params.top_p * float(np.exp(scores).sum()))
        kept = nucleus if kept is None else kept[nucleus]
        scores = scores[nucleus]
    if params.min_p > 0.0:
        likely = np.flatnonzero(scores >= math.log(params.min_p))
        kept = likely if kept is None else kept[likely]
    return kept


def _draw(scores: Floats, number: float) -> int:
    """The index where the running total of exp(scores) passes `number` of the whole. Uses `scores` up."""
    running = np.exp(scores, out=scores)
    np.cumsum(running, out=running)
    # Kept below the total, whatever the rounding, so that the index found has weight.
    target = min(number * running[-1], np.nextafter(running[-1], 0.0))
    return int(np.searchsorted(running, target, side="right"))

"""Arithmetic on one row of logits: adjustments, ranking, log-probabilities. Everything is float64.

A row is worked on by itself, in numpy, on one thread: its result cannot depend on the rest of the batch.
Vocabulary-sized arrays are changed in place and at most two are alive at once: the allocator keeps that much
for the next call, where more would be returned to the system and paid for again in page faults.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kakeya.errors import InvalidArgument, StepFailed
from kakeya.types import SamplingParams, TokenLogprob

Floats = NDArray[np.float64]
Ids = NDArray[np.intp]

NO_TOKEN_LEFT = "the constraint leaves no token to choose"

_FLOORS = (-3.0, -6.0, -9.0, -12.0, -15.0)  # relative to the best score; what matters is seldom below
_SORTED_AT_ONCE = 1024
_PIVOT_SAMPLE = 64


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidArgument if the bias names a token that the model does not have."""
    for token_id in params.logit_bias:
        if not 0 <= token_id < vocab_size:
            raise not_a_token("logit_bias", token_id, vocab_size)


def adjusted(row: NDArray[np.float32], params: SamplingParams, recent: Sequence[int]) -> Floats:
    """A copy of the logits after penalties and bias.

    Repetition divides positive and multiplies negative logits of the tokens in `recent`; presence is then
    subtracted once and frequency once for each occurrence; the bias is added last.
    Raises InvalidArgument for a token id outside the vocabulary.
    """
    logits = row.astype(np.float64)
    if params.has_penalties and len(recent):
        _penalize(logits, params, recent)
    if params.logit_bias:
        check_vocabulary(params, row.size)
        logits[list(params.logit_bias.keys())] += list(params.logit_bias.values())
    return logits


def _penalize(logits: Floats, params: SamplingParams, recent: Sequence[int]) -> None:
    seen, counts = np.unique(np.asarray(recent, dtype=np.intp), return_counts=True)
    for outermost in (seen[0], seen[-1]):
        if not 0 <= outermost < logits.size:
            raise not_a_token("recent tokens", int(outermost), logits.size)
    chosen = logits[seen]
    penalty = params.repetition_penalty
    chosen = np.where(chosen > 0, chosen / penalty, chosen * penalty)
    logits[seen] = chosen - params.presence_penalty - params.frequency_penalty * counts


def not_a_token(what: str, token_id: int, vocab_size: int) -> InvalidArgument:
    return InvalidArgument(f"{what}: {token_id} is not a token id; 0 to {vocab_size - 1} are")


def rule_out(logits: Floats, mask: bytes) -> None:
    """Make the tokens impossible whose bits are not set, lowest id first, little-endian.

    Raises StepFailed when no possible one is left.
    """
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=logits.size, bitorder="little")
    np.putmask(logits, bits == 0, -np.inf)
    if logits.max() == -np.inf:
        raise StepFailed(NO_TOKEN_LEFT)


def relative(logits: Floats) -> Floats:
    """The same array, changed to differences from its greatest."""
    logits -= logits.max()
    return logits


def leaders(scores: Floats, measure: Callable[[Floats], Floats], target: float) -> Ids:
    """The best-scoring ids, of equal scores the lower id, just enough for their `measure` to reach `target`.

    `scores` are relative to the best, which is 0; `measure` says what each of them adds. The ids come in
    ascending order: the set is found by partition, as ranking a whole vocabulary would take longer than
    everything else a sampler does.
    """
    ids = _near_the_best(scores, measure, target)
    values, chosen = scores[ids], np.zeros(scores.size, dtype=np.bool_)
    while ids.size > _SORTED_AT_ONCE:
        pivot = np.median(values[:: ids.size // _PIVOT_SAMPLE])
        above = np.flatnonzero(values >= pivot)
        mass = measure(values[above]).sum()
        if mass < target:
            chosen[ids[above]] = True
            target -= mass
            rest = np.flatnonzero(values < pivot)
        elif above.size < ids.size:
            rest = above
        else:  # the pivot is the least score there is, shared by many
            break
        ids, values = ids[rest], values[rest]
    order = np.argsort(-values, kind="stable")
    crossing = int(np.searchsorted(np.cumsum(measure(values[order])), target))
    chosen[ids[order[: crossing + 1]]] = True
    return np.flatnonzero(chosen)


def _near_the_best(scores: Floats, measure: Callable[[Floats], Floats], target: float) -> Ids:
    for floor in _FLOORS:
        ids = np.flatnonzero(scores >= floor)
        if measure(scores[ids]).sum() >= target:
            return ids
    return np.arange(scores.size)


class LogProbs:
    """The model's own distribution over one row: log-softmax of the logits as the model gave them."""

    def __init__(self, row: NDArray[np.float32]) -> None:
        self._scores = relative(row.astype(np.float64))
        self._log_total = float(np.log(np.exp(self._scores).sum()))

    def of(self, token_id: int) -> TokenLogprob:
        return TokenLogprob(token_id, float(self._scores[token_id]) - self._log_total)

    def top(self, count: int) -> tuple[TokenLogprob, ...]:
        """The `count` most probable tokens, best first, of equal ones the lower id first."""
        best = leaders(self._scores, np.ones_like, count) if count else ()
        ordered = sorted((int(token_id) for token_id in best), key=lambda each: (-self._scores[each], each))
        return tuple(self.of(token_id) for token_id in ordered)

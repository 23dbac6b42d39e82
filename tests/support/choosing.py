"""Random rows and requests for the two samplers, which must choose the same tokens."""

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kakeya.engine.sampler import SampleRequest
from kakeya.types import SamplingParams, TokenEvent

SHAPES = ("gaussian", "flat", "peaked", "ties", "constant", "masked", "extreme", "lone")


def random_row(rng: np.random.Generator, shape: str, size: int) -> NDArray[np.float32]:
    """Logits of one kind. At least one is finite and none is NaN or +inf."""
    normal = rng.normal(size=size)
    rows: dict[str, Callable[[], NDArray[np.float64]]] = {
        "gaussian": lambda: normal * 3,
        "flat": lambda: normal * 1e-3,
        "peaked": lambda: normal * 2 - 6 * np.log(1 + rng.permutation(size)),
        "ties": lambda: rng.integers(-3, 3, size).astype(np.float64) / 2,
        "constant": lambda: np.full(size, normal[0]),
        "masked": lambda: np.where(rng.random(size) < 0.6, -np.inf, normal),
        "extreme": lambda: rng.choice([-3e38, 3e38, 0.0, -0.0, 1e-40, -1e-40, 88.0, -5.0], size),
        "lone": lambda: np.where(np.arange(size) == rng.integers(size), 2.5, -np.inf),
    }
    row: NDArray[np.float32] = rows[shape]().astype(np.float32)
    if np.isneginf(row).all():
        row[rng.integers(size)] = 1.0
    return row


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    """Any combination; each setting is left alone half of the time."""

    def maybe(default: float, *choices: float) -> float:
        return default if rng.random() < 0.5 else float(rng.choice(choices))

    biased = rng.integers(0, vocab, rng.integers(1, 6)) if rng.random() < 0.2 else ()
    return SamplingParams(
        temperature=float(rng.choice([0.0, 1.0, 0.7, 1.0, 2.0, 100.0, 0.01, 1e-10, 5e-324])),
        top_k=int(maybe(0, 1, 2, 3, 50, 500, 5000, vocab // 2, vocab, 2**31 - 1)),
        top_p=maybe(1.0, 0.95, 0.5, 0.9, 0.99, 1e-12, 1 - 1e-12, float(rng.random()) or 1.0),
        min_p=maybe(0.0, 0.05, 0.5, 1.0, 1e-9, 1e-300),
        repetition_penalty=maybe(1.0, 1.1, 0.8, 100.0, 0.01),
        presence_penalty=maybe(0.0, 0.5, -1.5, 100.0),
        frequency_penalty=maybe(0.0, 0.3, -0.2),
        logit_bias={int(token): float(rng.choice([-1e4, -1.0, 0.5, 7.0, 1e4])) for token in biased},
        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
        logprobs=bool(rng.random() < 0.3),
        top_logprobs=int(maybe(0, 1, 3, 20)),
    )


def random_request(rng: np.random.Generator, row: NDArray[np.float32]) -> SampleRequest:
    """A request that the row can answer: its mask leaves a token that is possible."""
    recent = array("i", rng.integers(0, row.size, rng.integers(0, 1200)).tolist())
    mask = None
    if rng.random() < 0.3:
        allowed = rng.random(row.size) < rng.choice([0.001, 0.5, 0.999])
        allowed[rng.choice(np.flatnonzero(np.isfinite(row)))] = True
        mask = np.packbits(allowed, bitorder="little").tobytes()
    return SampleRequest(random_params(rng, row.size), int(rng.integers(0, 2**62)), recent, mask)


def random_batch(seed: int, vocab: int, rows: int) -> tuple[torch.Tensor, list[SampleRequest]]:
    rng = np.random.default_rng(seed)
    logits = [random_row(rng, str(rng.choice(SHAPES)), vocab) for _ in range(rows)]
    return torch.from_numpy(np.stack(logits)), [random_request(rng, row) for row in logits]


def differences(ours: Sequence[TokenEvent], theirs: Sequence[TokenEvent]) -> list[int]:
    """The rows where two samplers disagree: tokens to the letter, log-probabilities up to rounding."""
    return [row for row, pair in enumerate(zip(ours, theirs, strict=True)) if not _same(*pair)]


def _same(ours: TokenEvent, theirs: TokenEvent) -> bool:
    if ours.token_id != theirs.token_id or (ours.logprob is None) is not (theirs.logprob is None):
        return False
    if [each.token_id for each in ours.top_logprobs] != [each.token_id for each in theirs.top_logprobs]:
        return False
    mine = [ours.logprob or 0.0, *(each.logprob for each in ours.top_logprobs)]
    yours = [theirs.logprob or 0.0, *(each.logprob for each in theirs.top_logprobs)]
    return np.allclose(mine, yours, rtol=1e-12, atol=1e-12)

"""Sampling in plain torch: every row goes through every filter."""

import torch
from torch import Tensor

from kakeya.kernels.gpu import philox
from kakeya.kernels.gpu.interface import SamplingTable


def sample(logits: Tensor, sampling: SamplingTable) -> Tensor:
    """int64 [rows]: the token, or -1 where the best logit is not finite."""
    clean = logits.double().nan_to_num(float("inf"), float("inf"), float("-inf"))
    top = clean.amax(1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    best = torch.where(clean == top, ids, len(ids)).amin(1)  # of equal ones the lowest
    drawn = _drawn(clean - top, sampling)
    token = torch.where(sampling.temperature > 0, drawn, best)
    return torch.where(top[:, 0].isfinite(), token, -1)


def _drawn(relative: Tensor, sampling: SamplingTable) -> Tensor:
    warm = torch.where(sampling.temperature > 0, sampling.temperature, 1.0)
    scores = relative / warm.double()[:, None]
    weights = torch.where(_kept(scores, sampling), scores.exp(), 0.0)
    running = weights.cumsum(1)
    total = running[:, -1]
    number = philox.uniform(sampling.seed, sampling.positions)
    # Kept below the total, whatever the rounding, so that the index found has weight.
    target = torch.minimum(number * total, torch.nextafter(total, torch.zeros_like(total)))
    return (running <= target[:, None]).sum(1).clamp(max=scores.shape[1] - 1)


def _kept(scores: Tensor, sampling: SamplingTable) -> Tensor:
    """Which ids may be sampled: top-k, of these top-p, of these min-p."""
    ranked, order = scores.sort(dim=1, descending=True, stable=True)  # of equal ones the lower id first
    rank = torch.arange(scores.shape[1], device=scores.device)
    top_k = sampling.top_k[:, None]
    kept = (rank < top_k) | (top_k <= 0)
    running = torch.where(kept, ranked.exp(), 0.0).cumsum(1)
    top_p = sampling.top_p.double()[:, None]
    before = running.roll(1, 1)
    before[:, 0] = 0.0
    # The token that crosses the line is in: it is the first whose predecessors hold less.
    kept &= (before < top_p * running[:, -1:]) | (top_p >= 1.0)
    min_p = sampling.min_p.double()[:, None]
    kept &= (ranked >= min_p.log()) | (min_p <= 0.0)
    return torch.zeros_like(kept).scatter(1, order, kept)

"""The device memory that sampling needs between its kernels."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kakeya.kernels.gpu.launches import power_of_two

SEGMENT = 2048
"""Tokens of a row whose weights are summed together."""
BINS = 2048
"""Bins of the histogram over the bracket of the cutoff."""
LISTED = 8192
"""Room for the tokens in the bins of the cutoff. If there are more, the whole row is read again."""


@dataclass(frozen=True)
class SamplingScratch:
    """What the kernels of sampling leave for each other. Calls on one stream may share it."""

    arrived: Tensor  # int32 [rows, 2]: programs that are done, tokens listed; zero between calls
    partials: Tensor  # int64 [rows, segments, 3]: the results of each program of the row
    brackets: Tensor  # float32 [rows, 3]: the greatest logit, and the bracket of the cutoff
    bins: Tensor  # int64 [rows, 2, BINS]: weights and counts by distance; zero between calls
    cutoffs: Tensor  # int64 [rows, 5]: the bins of the cutoff, and the sums before them
    segments: Tensor  # int64 [rows, segments]: the weight of the kept tokens
    listed: Tensor  # int32 [rows, LISTED]: the tokens in the bins of the cutoff

    @classmethod
    def of(cls, rows: int, vocab_size: int, device: torch.device) -> "SamplingScratch":
        """Scratch for `rows` rows of logits."""
        segments = segments_of(vocab_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        return cls(
            arrived=zeros(2, dtype=torch.int32),
            partials=zeros(segments, 3),
            brackets=zeros(3, dtype=torch.float32),
            bins=zeros(2, BINS),
            cutoffs=zeros(5),
            segments=zeros(segments),
            listed=zeros(LISTED, dtype=torch.int32),
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())


def segments_of(vocab_size: int) -> int:
    """Segments of a row, rounded up to a power of two."""
    return power_of_two(-(-vocab_size // SEGMENT))

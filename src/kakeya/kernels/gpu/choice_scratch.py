"""The room that choosing tokens on a device takes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kakeya.kernels.gpu.launches import power_of_two

SEGMENT = 2048
"""Tokens of a row whose weights are added up together."""
BINS = 2048
"""Steps between the distances from the best logit where the filters may end."""
LISTED = 8192
"""Tokens that may share the bin in which the filters end before the whole row is walked for it."""


@dataclass(frozen=True)
class ChoiceScratch:
    """What choosing leaves between its launches. Calls on one stream may share it."""

    arrived: Tensor  # int32 [rows, 2]: programs that are done, tokens listed; all zero between calls
    parts: Tensor  # int64 [rows, segments, 3]: what each program of the row has found
    aims: Tensor  # float32 [rows, 3]: the best logit, and between which distances from it the filters end
    bins: Tensor  # int64 [rows, 2, BINS]: weights and counts by distance; all zero between calls
    cuts: Tensor  # int64 [rows, 5]: the bins where the filters end, and what lies before them
    segments: Tensor  # int64 [rows, segments]: what the kept tokens weigh
    listed: Tensor  # int32 [rows, LISTED]: the tokens of the bins where the filters end

    @classmethod
    def of(cls, rows: int, vocab_size: int, device: torch.device) -> "ChoiceScratch":
        """Room for so many rows of logits."""
        segments = segments_of(vocab_size)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        return cls(
            arrived=zeros(2, dtype=torch.int32),
            parts=zeros(segments, 3),
            aims=zeros(3, dtype=torch.float32),
            bins=zeros(2, BINS),
            cuts=zeros(5),
            segments=zeros(segments),
            listed=zeros(LISTED, dtype=torch.int32),
        )

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())


def segments_of(vocab_size: int) -> int:
    """How many segments a row has, rounded up to a power of two."""
    return power_of_two(-(-vocab_size // SEGMENT))

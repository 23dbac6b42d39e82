"""The requests and results of native sampling; `engine.sampler` defines which token is chosen."""

from array import array
from enum import IntEnum
from typing import NamedTuple


class ChoiceRequest(NamedTuple):
    """How one row's token is chosen, in the order in which the library reads it. None stands for nothing."""

    temperature: float  # 0: the best
    top_k: int  # 0: all
    top_p: float
    least_score: float  # the logarithm of min-p; -inf for none
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    number: float  # uniform in [0, 1)
    recent: "array[int] | None" = None  # int32; what the penalties look at
    bias_ids: "array[int] | None" = None  # int64, no two the same
    bias_values: "array[float] | None" = None  # float64, one for each of them
    mask: bytes | None = None  # a bit for each token that may be chosen, lowest id first, little-endian
    top_logprobs: int = -1  # -1: no log-probabilities at all


class ChoiceStatus(IntEnum):
    """Whether a row has a token, or why it has none."""

    CHOSEN = 0
    NOT_FINITE = 1
    NO_TOKEN = 2
    NOT_A_TOKEN = 3


class Choice(NamedTuple):
    """The answer for one row. `token` is the wrong id with NOT_A_TOKEN; `best` is the greatest logit."""

    status: int
    token: int
    best: float
    logprob: float
    top: list[tuple[int, float]]

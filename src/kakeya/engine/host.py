"""Backends that compute on the calling thread: a step is over when its launch returns."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from kakeya.engine.backend import LaunchedStep, StepOutput, StepResult
from kakeya.engine.batch import Segment
from kakeya.engine.cpu.sampler import native_sampler
from kakeya.engine.sampler import Sampler, SampleRequest, sample
from kakeya.engine.slab import SlabPool
from kakeya.kernels import Kernels
from kakeya.types import TokenEvent


class HostBackend(ABC):
    """All of a `Backend` but the arithmetic. The host chooses tokens, natively where kernels were built."""

    runs_ahead = False
    draft_counts = ()
    most_drafting = 0

    def __init__(self, pool: SlabPool, vocab_size: int, kernels: Kernels | None, fingerprint: str) -> None:
        self.pool = pool
        self.vocab_size = vocab_size
        self.fingerprint = fingerprint
        self._sample: Sampler = sample if kernels is None else native_sampler(kernels)

    def is_lost(self) -> bool:
        return False

    def launch(
        self,
        segments: Sequence[Segment],
        requests: Sequence[SampleRequest],
        hidden_layers: Sequence[int] = (),
    ) -> LaunchedStep:
        output = self.run(segments, hidden_layers)
        return StepResult(self._sample(output.logits, requests), output.hidden)

    def launch_drafting(
        self, segments: Sequence[Segment], requests: Sequence[SampleRequest], count: int
    ) -> LaunchedStep:
        raise AssertionError("this backend has no drafter of its own")

    def follow(self, step: LaunchedStep) -> LaunchedStep:
        raise AssertionError("this backend does not run ahead")

    @abstractmethod
    def run(self, segments: Sequence[Segment], hidden_layers: Sequence[int] = ()) -> StepOutput:
        """The logits of the asked-for rows, which the next run may overwrite, and the hidden states of all
        rows, in segment order."""

    # What a drafter shares with the model that it guesses for.

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """What the first layer is given, float32 rows [n, hidden]."""

    @abstractmethod
    def logits(self, normed: Tensor) -> Tensor:
        """What the head makes of normed rows, float32 [n, vocab]."""

    def choose(self, logits: Tensor, requests: Sequence[SampleRequest]) -> list[TokenEvent]:
        """A token for each row of logits."""
        return self._sample(logits, requests)

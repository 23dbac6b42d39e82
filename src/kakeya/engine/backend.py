"""The seam between the engine and a device: launch a planned batch, read its result, score a text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from kakeya.engine.batch import Segment
from kakeya.engine.sampler import SampleRequest
from kakeya.engine.slab import SlabPool
from kakeya.errors import DeviceLost, KakeyaError
from kakeya.types import TokenEvent

T = TypeVar("T")

# reduce(position, logits): what is wanted of the logits after the tokens from `position` on, float32
# [rows, vocab] where the backend has them. They are overwritten once it has returned.
Reduction = Callable[[int, Tensor], T]


class LaunchedStep(Protocol):
    """A step that the device computes, or has computed."""

    def result(self) -> "StepResult":
        """Wait for it. Raises StepFailed when a row gave no finite logit."""


@dataclass(frozen=True)
class StepResult:
    """What a finished step chose, and the hidden states that it showed."""

    sampled: Sequence[TokenEvent]
    """One for each row whose logits were asked for, in segment order."""
    hidden: Mapping[int, Tensor]
    """The outputs of the layers that were asked for, [rows, hidden], in segment order."""
    runs: Sequence[int] = ()
    """How many of the sampled tokens each segment of a drafting step got: its right guesses, and one more."""

    def result(self) -> "StepResult":
        return self


@dataclass(frozen=True)
class StepOutput:
    """What a step computed, where the host chooses the tokens."""

    logits: Tensor
    """[asked rows, vocab] float32, in segment order."""
    hidden: Mapping[int, Tensor]


class Backend(Protocol):
    """A device that holds a pool of slabs and runs batches over it. Owned by the engine thread."""

    @property
    def pool(self) -> SlabPool: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Names the model and its numbers: slab contents are meaningless under another one."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched while the one before is still computed, with PENDING tokens."""

    @property
    def any_cut(self) -> bool:
        """Whether prompts may be cut anywhere: a row's bits do not depend on it, or depend on its company in
        any case. Elsewhere a prompt is computed in aligned blocks, each of them whole."""
        ...

    def is_lost(self) -> bool:
        """Whether the device has failed for good. Asked when something raised that it may have caused."""

    def launch(
        self,
        segments: Sequence[Segment],
        requests: Sequence[SampleRequest],
        hidden_layers: Sequence[int] = (),
    ) -> LaunchedStep:
        """Compute every row, writing its keys and values to its slab (already reserved), and choose a token
        for each of the `requests`, of which there is one for each asked-for row of logits."""

    @property
    def draft_counts(self) -> Sequence[int]:
        """How many tokens the backend can guess by itself in a step, ascending; none without a drafter."""
        ...

    @property
    def most_drafting(self) -> int:
        """For how many sessions at once it can."""
        ...

    def launch_drafting(
        self, segments: Sequence[Segment], requests: Sequence[SampleRequest], count: int
    ) -> LaunchedStep:
        """Guess `count` tokens behind each single token, verify them, and keep what is right.

        Every segment gets from one token to count + 1. They are chosen as `requests` say, which are plain.
        """

    def follow(self, step: LaunchedStep) -> LaunchedStep:
        """The same single tokens once more, each PENDING and one position further, with the same requests.
        A drafting step goes on where it ends.

        `step` is the last one that was launched. Only for a backend that runs ahead.
        """

    def score(self, segment: Segment, reduce: Reduction[T]) -> list[T]:
        """Compute a segment alone; returns what `reduce` makes of its logits, some rows at a time.

        The logits of a whole block can be larger than the model.
        """


@dataclass(frozen=True)
class Failed:
    """A step that could not be launched."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


def raise_if_lost(backend: Backend, error: Exception) -> None:
    """Raises DeviceLost if `error` was the end of the device. Call on the engine thread."""
    if isinstance(error, KakeyaError):
        return  # one of our own errors, so it is not the device that failed
    if backend.is_lost():
        fault = (str(error) or repr(error)).splitlines()[0]
        raise DeviceLost(f"the engine died: the device failed: {fault}") from error

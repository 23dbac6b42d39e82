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
        ...


@dataclass(frozen=True)
class StepResult:
    """What a step chose, and what it showed on the way: a step that is over."""

    sampled: Sequence[TokenEvent]
    """One for each row whose logits were asked for, in segment order."""
    hidden: Mapping[int, Tensor]
    """The outputs of the layers that were asked for, [rows, hidden], in segment order."""

    def result(self) -> "StepResult":
        return self


class Backend(Protocol):
    """A device that holds a pool of slabs and runs batches over it. Owned by the engine thread."""

    @property
    def pool(self) -> SlabPool: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def fingerprint(self) -> str:
        """Names the model and its numbers: slab contents are meaningless under another one."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Whether a step may be launched while the one before is still computed, with PENDING tokens."""
        ...

    def is_lost(self) -> bool:
        """Whether the device has failed for good, so that nothing will ever be computed on it again.

        To be asked when something raised that it may have had a part in.
        """
        ...

    def launch(
        self,
        segments: Sequence[Segment],
        requests: Sequence[SampleRequest],
        hidden_layers: Sequence[int] = (),
    ) -> LaunchedStep:
        """Compute every row, writing its keys and values to its slab (already reserved), and choose a token
        for each of the `requests`, of which there is one for each asked-for row of logits."""
        ...

    def follow(self, step: LaunchedStep) -> LaunchedStep:
        """The same single tokens once more, each PENDING and one position further, with the same requests.

        `step` is the last one that was launched. Only for a backend that runs ahead.
        """
        ...

    def score(self, segment: Segment, reduce: Reduction[T]) -> list[T]:
        """Compute a segment alone; what `reduce` makes of the logits of all its rows, some rows at a time.

        The logits of a block are larger than a model may be, and seldom wanted as they are.
        """
        ...


@dataclass(frozen=True)
class Failed:
    """A step that could not be launched."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


def raise_if_lost(backend: Backend, error: Exception) -> None:
    """Raises DeviceLost if `error` was the end of the device. Call on the engine thread."""
    if isinstance(error, KakeyaError):
        return  # in our own words, so the device is not what failed
    if backend.is_lost():
        fault = (str(error) or repr(error)).splitlines()[0]
        raise DeviceLost(f"the engine died: the device failed: {fault}") from error

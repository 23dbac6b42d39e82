"""Runs planned batches on a device. What differs between devices hides behind `Backend`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from kakeya.engine.attention import NativeAttention, TorchAttention
from kakeya.engine.batch import Segment
from kakeya.engine.native_sampler import NativeSampler
from kakeya.engine.sampler import Sampler, SampleRequest, sample
from kakeya.engine.slab import SlabPool
from kakeya.errors import InvariantViolation
from kakeya.kernels import Kernels
from kakeya.models.decoder import Decoder
from kakeya.types import Numerics, TokenEvent

T = TypeVar("T")

# reduce(position, logits): what is wanted of the logits after the tokens from `position` on, float32
# [rows, vocab] where the backend has them. They are overwritten once it has returned.
Reduction = Callable[[int, Tensor], T]


@dataclass(frozen=True)
class StepResult:
    """What a step chose, and what it showed on the way."""

    sampled: Sequence[TokenEvent]
    """One for each row whose logits were asked for, in segment order."""
    hidden: Mapping[int, Tensor]
    """The outputs of the layers that were asked for, [rows, hidden], in segment order."""


class LaunchedStep(Protocol):
    """A step that the device computes, or has computed."""

    def result(self) -> StepResult:
        """Wait for it. Raises StepFailed when a row gave no finite logit."""
        ...


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
class StepOutput:
    """What a step computed, before anything is chosen."""

    logits: Tensor
    """[asked rows, vocab] float32, in segment order."""
    hidden: Mapping[int, Tensor]


@dataclass(frozen=True)
class Computed:
    """A step that was over when its launch returned."""

    outcome: StepResult

    def result(self) -> StepResult:
        return self.outcome


@dataclass(frozen=True)
class Failed:
    """A step that could not be launched."""

    error: Exception

    def result(self) -> StepResult:
        raise self.error


class CpuBackend:
    """The decoder in this process's memory, with native kernels where they were built."""

    def __init__(
        self, decoder: Decoder, pool: SlabPool, numerics: Numerics, kernels: Kernels | None, fingerprint: str
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._fingerprint = fingerprint
        self._sample: Sampler = sample if kernels is None else NativeSampler(kernels)
        model = decoder.config
        self._attention: NativeAttention | TorchAttention
        sizes = {model.heads_of(layer).head_dim for layer in range(model.num_layers)}
        if kernels is not None and all(map(kernels.supports_head_dim, sizes)):
            self._attention = NativeAttention(kernels, model, pool)
        else:
            self._attention = TorchAttention(model, pool, numerics)

    @property
    def pool(self) -> SlabPool:
        return self._pool

    @property
    def vocab_size(self) -> int:
        return self._decoder.config.vocab_size

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def runs_ahead(self) -> bool:
        return False

    def is_lost(self) -> bool:
        return False

    def launch(
        self,
        segments: Sequence[Segment],
        requests: Sequence[SampleRequest],
        hidden_layers: Sequence[int] = (),
    ) -> LaunchedStep:
        output = self.run(segments, hidden_layers)
        return Computed(StepResult(self._sample(output.logits, requests), output.hidden))

    def follow(self, step: LaunchedStep) -> LaunchedStep:
        raise AssertionError("this backend does not run ahead")

    def score(self, segment: Segment, reduce: Reduction[T]) -> list[T]:
        return [reduce(segment.start, self.run([segment]).logits)]

    def run(self, segments: Sequence[Segment], hidden_layers: Sequence[int] = ()) -> StepOutput:
        """The logits of the asked-for rows, and the hidden states."""
        step = self._attention.begin(segments)
        taps: dict[int, Tensor] = {}

        def keep(layer: int, output: Tensor) -> None:
            if layer in hidden_layers:
                taps[layer] = output.clone()

        token_ids = torch.tensor([token for s in segments for token in s.tokens], dtype=torch.int64)
        fused = None if hidden_layers or self._decoder.fused is None else step.context()
        if fused is not None:
            hidden = self._decoder.forward_fused(token_ids, fused)
        else:
            hidden = self._decoder.forward(token_ids, step.attend, keep if hidden_layers else None)
        if step.layers_written != self._decoder.config.num_layers:
            raise InvariantViolation(
                "INV-1", f"{step.layers_written} of {self._decoder.config.num_layers} layers were written"
            )
        rows = _logit_rows(segments)
        asked = hidden if len(rows) == len(token_ids) else hidden[rows]
        logits = self._decoder.logits(asked) if rows else torch.empty((0, self.vocab_size))
        return StepOutput(logits, taps)


def _logit_rows(segments: Sequence[Segment]) -> list[int]:
    """The batch's rows whose logits are wanted: the last `logit_rows` of each segment."""
    rows: list[int] = []
    end = 0
    for segment in segments:
        end += segment.rows
        rows.extend(range(end - segment.logit_rows, end))
    return rows

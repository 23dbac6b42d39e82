"""A step in flight. Tokens that the device samples are fetched at once, other logits when they are needed."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakeya.engine.backend import StepResult
from kakeya.engine.cuda.shapes import StepShape
from kakeya.engine.cuda.tables import SingleRows
from kakeya.engine.device import DeviceEvent, host_buffer
from kakeya.engine.sampler import SampleRequest, sample
from kakeya.errors import StepFailed
from kakeya.types import TokenEvent


class SampledTokens:
    """A pinned buffer that receives the tokens that a step samples on the device."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._memory = host_buffer(rows, dtype=torch.int32, device=device)
        self._arrived = DeviceEvent(device)
        self._count = 0

    def fetch(self, sampled: Tensor, count: int) -> None:
        """Start the copy behind the work that the device has so far. Does not wait."""
        self._count = count
        self._memory[:count].copy_(sampled[:count], non_blocking=True)
        self._arrived.record()

    def tokens(self) -> list[int]:
        """Wait for the copy. -1 stands for a row without a finite logit."""
        self._arrived.wait()
        return self._memory[: self._count].tolist()


class HostRows:
    """The rows of logits that only the host can sample: penalties, bias, masks, log-probabilities."""

    def __init__(self, requests: Sequence[SampleRequest]) -> None:
        self._requests = {place: request for place, request in enumerate(requests) if not request.is_plain}
        self._logits: list[Tensor] = []

    def keep(self, logits: Tensor, first: int = 0) -> None:
        """Copy the rows that the host samples, before they are overwritten. `logits` has the rows from
        `first` on."""
        places = [place - first for place in self._requests if first <= place < first + len(logits)]
        if places:
            wanted = torch.tensor(places).to(logits.device, non_blocking=True)
            self._logits.append(logits.index_select(0, wanted))

    def sample(self) -> Iterator[tuple[int, TokenEvent]]:
        """Sample them: each row's place in the step, and its token. Waits for the device. Raises what
        sampling raises."""
        if self._requests:
            logits = torch.cat([rows.cpu() for rows in self._logits])
            yield from zip(self._requests, sample(logits, list(self._requests.values())), strict=True)


@dataclass(frozen=True)
class LaunchedTokens:
    """A step in flight."""

    on_device: SampledTokens
    on_host: HostRows
    hidden: Mapping[int, Tensor]
    rows: SingleRows | None = None
    """The tables of a step of single tokens, from which the next step follows."""

    def result(self) -> StepResult:
        tokens = self.on_device.tokens()
        if tokens and min(tokens) < 0:
            raise StepFailed(f"the model's best logit is not a finite number in row {tokens.index(-1)}")
        sampled = list(map(TokenEvent, tokens))
        for place, token in self.on_host.sample():
            sampled[place] = token
        return StepResult(sampled, self.hidden)


@dataclass(frozen=True)
class LaunchedDrafts:
    """A drafting step in flight."""

    runs: SampledTokens
    shape: StepShape
    sessions: int

    def result(self) -> StepResult:
        numbers, width = self.runs.tokens(), self.shape.drafts + 2
        runs = [numbers[first + 1 : first + 1 + numbers[first]] for first in range(0, len(numbers), width)]
        sampled = [TokenEvent(token) for run in runs for token in run]
        if min(token.token_id for token in sampled) < 0:
            raise StepFailed("the model's best logit is not a finite number in a row of a draft")
        return StepResult(sampled, {}, [len(run) for run in runs])

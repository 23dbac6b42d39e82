"""A step on its way: the tokens it chooses come back by themselves, other logits when they are asked for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakeya.engine.backend import StepResult
from kakeya.engine.cuda.tables import SingleRows
from kakeya.engine.device import DeviceEvent, host_buffer
from kakeya.engine.sampler import SampleRequest, sample
from kakeya.errors import StepFailed
from kakeya.types import TokenEvent


class ChosenTokens:
    """A pinned buffer that receives what a step has chosen."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._memory = host_buffer(rows, dtype=torch.int32, device=device)
        self._arrived = DeviceEvent(device)
        self._count = 0

    def fetch(self, chosen: Tensor, count: int) -> None:
        """Have the device send them once it has come so far. Does not wait."""
        self._count = count
        self._memory[:count].copy_(chosen[:count], non_blocking=True)
        self._arrived.record()

    def tokens(self) -> list[int]:
        """Wait for them. -1 for a row without a finite logit."""
        self._arrived.wait()
        return self._memory[: self._count].tolist()


class HostRows:
    """The rows of logits that only the host can sample: penalties, bias, masks, log-probabilities."""

    def __init__(self, requests: Sequence[SampleRequest]) -> None:
        self._requests = {place: request for place, request in enumerate(requests) if not request.is_plain}
        self._parts: list[Tensor] = []

    def keep(self, logits: Tensor, first: int = 0) -> None:
        """Keep its rows of these, which are the step's from `first` on, before they are overwritten."""
        places = [place - first for place in self._requests if first <= place < first + len(logits)]
        if places:
            wanted = torch.tensor(places).to(logits.device, non_blocking=True)
            self._parts.append(logits.index_select(0, wanted))

    def sampled(self) -> Iterator[tuple[int, TokenEvent]]:
        """The row's place among all and its token. Waits for the device. Raises what sampling raises."""
        if self._requests:
            logits = torch.cat([part.cpu() for part in self._parts])
            yield from zip(self._requests, sample(logits, list(self._requests.values())), strict=True)


@dataclass(frozen=True)
class LaunchedTokens:
    """A step in flight."""

    chosen: ChosenTokens
    on_host: HostRows
    hidden: Mapping[int, Tensor]
    rows: SingleRows | None = None
    """Of a step of single tokens: what it takes to go one token further."""

    def result(self) -> StepResult:
        tokens = self.chosen.tokens()
        if tokens and min(tokens) < 0:
            raise StepFailed(f"the model's best logit is not a finite number in row {tokens.index(-1)}")
        sampled = list(map(TokenEvent, tokens))
        for place, token in self.on_host.sampled():
            sampled[place] = token
        return StepResult(sampled, self.hidden)

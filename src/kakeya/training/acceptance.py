"""How well a drafter guesses on conversations that it has not seen, as a session would experience it.

Drafts are made from every position of an answer at once, each going on from its own guesses. Then each answer
is walked as generation proceeds: a step takes what was guessed right and one token more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kakeya.kernels.gpu import GpuKernels, RowTable, SamplingScratch, SamplingTable
from kakeya.training.conversations import (
    Answer,
    Conversation,
    Conversations,
    answers_in,
    seed_of,
    temperature_of,
)
from kakeya.training.features import FeatureStore
from kakeya.training.network import Attention, Network, StepDrafts, block_draft
from kakeya.training.verifier import SharedParts

_AT_ONCE = 8
_ROWS_AT_ONCE = 2048


@dataclass
class Tally:
    """What walking some answers gave. `reached` and `right` count guesses by place: those whose predecessors
    were all right, and those that were right too."""

    places: int
    steps: int = 0
    tokens: int = 0
    reached: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reached, self.right = [0] * self.places, [0] * self.places

    def walk(self, answer: Answer, accepted: Sequence[int]) -> None:
        """Go through an answer whose first token is known. `accepted` has, for each position of the
        conversation, how many guesses of a draft from there were right."""
        newest, last = answer.start, answer.end - 1
        while newest < last:
            left = last - newest
            right = min(accepted[newest - 1], self.places, left)
            for place in range(min(right + 1, self.places, left)):
                self.reached[place] += 1
                self.right[place] += place < right
            self.steps += 1
            self.tokens += min(right + 1, left)
            newest += right + 1

    @property
    def tokens_per_step(self) -> float | None:
        return self.tokens / self.steps if self.steps else None

    def figures(self) -> dict[str, object]:
        counted = zip(self.right, self.reached, strict=True)
        by_place = [right / reached if reached else None for right, reached in counted]
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "tokens_per_step": self.tokens_per_step,
            "acceptance_by_place": by_place,
        }


@dataclass(frozen=True)
class Walked:
    """The tallies of one temperature and block: of all answers, and of those that ended by themselves."""

    temperature: float
    block: int
    every: Tally
    ended: Tally


class Examiner:
    """Holds a network against held-out conversations."""

    def __init__(
        self,
        conversations: Conversations,
        held_out: Sequence[Conversation],
        store: FeatureStore,
        shared: SharedParts,
        kernels: GpuKernels,
    ) -> None:
        self._settings, self._ends = conversations.settings, conversations.ends
        self._held_out, self._store, self._shared = held_out, store, shared
        self._choice = _Choice(kernels, shared)

    @torch.no_grad()
    def examine(self, network: Network, blocks: Sequence[int]) -> list[Walked]:
        """Walk every held-out answer with drafts of these lengths."""
        places = max(blocks)
        accepted = [row for part in self._parts() for row in self._accepted(network, part, places).tolist()]
        temperatures = sorted({temperature_of(each.number) for each in self._held_out})
        return [self._walk(each, block, accepted) for each in temperatures for block in blocks]

    def _walk(self, temperature: float, block: int, accepted: Sequence[Sequence[int]]) -> Walked:
        walked = Walked(temperature, block, Tally(block), Tally(block))
        for conversation, row in zip(self._held_out, accepted, strict=True):
            if temperature_of(conversation.number) != temperature:
                continue
            for answer in answers_in(conversation):
                walked.every.walk(answer, row)
                if int(conversation.tokens[answer.end - 1]) in self._ends:
                    walked.ended.walk(answer, row)
        return walked

    def _parts(self) -> Iterator[range]:
        for first in range(0, len(self._held_out), _AT_ONCE):
            yield range(first, min(first + _AT_ONCE, len(self._held_out)))

    def _accepted(self, network: Network, part: range, places: int) -> Tensor:
        """[B, L]: how many first guesses of the draft from each position were right."""
        batch = self._store.batch(torch.tensor(part), places + 1)
        features = network.features(batch.features)
        length = features.shape[1]
        anchors = torch.arange(length, device=features.device).expand(len(part), -1)
        attention = Attention.over(network.history(features), anchors)
        numbers = [self._held_out[place].number for place in part]
        right = torch.ones(len(part), length, dtype=torch.bool, device=features.device)
        accepted = torch.zeros(len(part), length, dtype=torch.int64, device=features.device)
        guesses = self._guesses(network, attention, anchors, features, batch.tokens, numbers, places)
        for place, guess in enumerate(guesses):
            right &= guess == batch.tokens[:, place + 2 : place + 2 + length]
            accepted += right
        return accepted

    def _guesses(
        self,
        network: Network,
        attention: Attention,
        anchors: Tensor,
        features: Tensor,
        tokens: Tensor,
        numbers: Sequence[int],
        places: int,
    ) -> Iterator[Tensor]:
        """The guess at each place from every anchor, [B, L] each."""
        newest = tokens[:, 1 : anchors.shape[1] + 1]
        seeds = [seed_of(self._settings, number) for number in numbers]
        temperatures = [temperature_of(number) for number in numbers]

        def choose(states: Tensor, place: int) -> Tensor:
            return self._choice(states, anchors + 2 + place, seeds, temperatures)

        if network.config.kind == "block":
            filled = block_draft(network, attention, anchors, features, self._shared.embed(newest))
            for place in range(min(places, network.config.block)):
                yield choose(filled[:, :, place], place)
            return
        drafts = StepDrafts(network, attention, anchors, features)
        for place in range(places):
            newest = choose(drafts.step(self._shared.embed(newest)), place)
            yield newest


class _Choice:
    """Chooses tokens as the runtime does, with the same random numbers."""

    def __init__(self, kernels: GpuKernels, shared: SharedParts) -> None:
        self._kernels, self._shared = kernels, shared
        self._device = shared.head.device
        self._scratch = SamplingScratch.of(_ROWS_AT_ONCE, len(shared.head), self._device)
        self._slabs = torch.zeros(_ROWS_AT_ONCE, dtype=torch.int32, device=self._device)

    def __call__(
        self, states: Tensor, positions: Tensor, seeds: Sequence[int], temperatures: Sequence[float]
    ) -> Tensor:
        """int64 [B, A] for states [B, A, n], with a seed and a temperature for each conversation."""
        count, device = positions.numel(), self._device
        each = positions.shape[1]
        flat = states.reshape(count, -1)
        table = SamplingTable(
            temperature=torch.tensor(temperatures, device=device).repeat_interleave(each),
            top_k=torch.zeros(count, dtype=torch.int32, device=device),
            top_p=torch.ones(count, device=device),
            min_p=torch.zeros(count, device=device),
            seed=torch.tensor(seeds, dtype=torch.int64, device=device).repeat_interleave(each),
            positions=positions.reshape(count).int(),
        )
        chosen = torch.empty(count, dtype=torch.int32, device=device)
        for first in range(0, count, _ROWS_AT_ONCE):
            part = slice(first, first + _ROWS_AT_ONCE)
            self._choose(self._shared.logits(flat[part]).float(), _rows(table, part), chosen[part])
        return self._shared.draft_vocab[chosen.long().clamp(min=0)].view_as(positions)

    def _choose(self, logits: Tensor, table: SamplingTable, chosen: Tensor) -> None:
        if not table.temperature.any():
            chosen.copy_(logits.argmax(-1))
            return
        slabs = self._slabs[: len(logits)]
        rows = RowTable(slabs, table.positions, slabs)
        newest = torch.zeros(1, dtype=torch.int32, device=self._device)
        self._kernels.sample(logits, rows, table, self._scratch, newest, chosen)


def _rows(table: SamplingTable, part: slice) -> SamplingTable:
    return SamplingTable(**{name: tensor[part] for name, tensor in vars(table).items()})

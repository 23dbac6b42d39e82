"""Which conversations and anchors each training step takes. All of it follows from the seed and the step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakeya.training.distillation import Targets
from kakeya.training.features import FeatureBatch, FeatureStore
from kakeya.training.network import Standard
from kakeya.training.settings import TrainingSettings
from kakeya.training.verifier import SharedParts


@dataclass(frozen=True)
class Examples:
    """What one training step computes: anchors [B, A] with the tokens that follow them [B, A, places]."""

    features: Tensor
    anchors: Tensor
    following: Tensor
    targets: Targets


class Batches:
    """The batches of a training. Conversations come in shards, of which one is on the device at a time."""

    def __init__(
        self,
        settings: TrainingSettings,
        shards: Sequence[range],
        load: Callable[[range], FeatureStore],
    ) -> None:
        self._settings, self._shards, self._load = settings, shards, load
        self._counts = [max(1, len(shard) // settings.batch) for shard in shards]
        self._held: tuple[range, FeatureStore] | None = None

    def at(self, step: int, margin: int) -> FeatureBatch:
        """The conversations of a step: each epoch takes each of them once, but for a shard's last few."""
        epoch, rest = divmod(step, sum(self._counts))
        shard = 0
        while rest >= self._counts[shard]:
            rest -= self._counts[shard]
            shard += 1
        store = self._store(self._shards[shard])
        order = torch.randperm(len(store), generator=_generator(self._settings.seed, epoch, shard))
        size = self._settings.batch
        return store.batch(order[rest * size : (rest + 1) * size], margin)

    def _store(self, shard: range) -> FeatureStore:
        if self._held is None or self._held[0] != shard:
            self._held = None  # frees the other one first
            self._held = shard, self._load(shard)
        return self._held[1]


def examples(
    batch: FeatureBatch,
    shared: SharedParts,
    standard: Standard,
    settings: TrainingSettings,
    places: int,
    step: int,
) -> Examples:
    """A run of anchors in each conversation, somewhere in its answers, and what they are held against."""
    anchors = _anchors(batch, settings.anchors, _generator(settings.seed, -1, step))
    length = batch.features.shape[1]
    reach = torch.arange(places, device=anchors.device)
    following = _columns(batch.tokens, anchors[..., None] + 1 + reach)
    places_of_targets = anchors[..., None] + 2 + reach
    came = shared.places[_columns(batch.tokens, places_of_targets)]
    counts = _columns(batch.answers, places_of_targets).cumprod(-1).bool() & (came >= 0)
    taught = anchors[:, :1] + 1 + torch.arange(anchors.shape[1] + places - 1, device=anchors.device)
    outputs = batch.features[..., -shared.model.hidden_size :]
    outputs = outputs.gather(1, taught.clamp(max=length - 1)[..., None].expand(-1, -1, outputs.shape[-1]))
    teacher = shared.last_normed(standard.undo_last(outputs))
    targets = Targets(teacher, came.clamp(min=0), counts)
    return Examples(batch.features, anchors, following, targets)


def margin_of(places: int) -> int:
    """How many columns of tokens the places of the last anchor reach beyond it."""
    return places + 1


def _anchors(batch: FeatureBatch, wanted: int, generator: torch.Generator) -> Tensor:
    """[B, A]: neighbouring positions, with one of the answers' at a random place among them."""
    length = batch.features.shape[1]
    count = min(wanted, length)
    learnt = batch.answers_on_host[:, 2 : length + 2].float()  # an anchor's first guess is two tokens on
    chosen = torch.multinomial(learnt + 1e-9, 1, generator=generator)
    before = torch.randint(count, chosen.shape, generator=generator)
    first = (chosen - before).clamp(0, length - count)
    device = batch.tokens.device
    return first.to(device, non_blocking=True) + torch.arange(count, device=device)


def _columns(table: Tensor, columns: Tensor) -> Tensor:
    """table[b, columns[b, …]]"""
    return table.gather(1, columns.flatten(1)).view_as(columns)


def _generator(seed: int, *numbers: int) -> torch.Generator:
    """Random numbers that these numbers alone decide."""
    mixed = seed
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 1) % 2**63
    return torch.Generator().manual_seed(mixed)

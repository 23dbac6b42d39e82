"""Batches: every conversation once an epoch, anchors in answers, targets that follow them."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kakeya.loading import LoadedModel
from kakeya.models.checkpoint import Checkpoint
from kakeya.training.batches import Batches, examples, margin_of
from kakeya.training.conversations import Conversations
from kakeya.training.features import FeatureReader, FeatureStore, measure_standard
from kakeya.training.network import Standard
from kakeya.training.verifier import SharedParts
from support.trainings import TRAINING

PLACES = 3
Load = Callable[[range], FeatureStore]


@pytest.fixture(scope="module")
def standard(model: LoadedModel, conversations: Conversations) -> Standard:
    return measure_standard(FeatureReader(model, (0, 1), 40), conversations.items)


@pytest.fixture(scope="module")
def load(model: LoadedModel, conversations: Conversations, standard: Standard) -> Load:
    reader = FeatureReader(model, (0, 1), 40)

    def load(part: range) -> FeatureStore:
        some = conversations.items[part.start : part.stop]
        return FeatureStore(reader, standard, some, [len(each.tokens) for each in some])

    return load


def rows_of(batches: Batches, step: int) -> list[tuple[int, ...]]:
    return [tuple(row) for row in batches.at(step, 0).tokens[:, :20].tolist()]


def test_an_epoch_takes_every_conversation_once(load: Load, conversations: Conversations) -> None:
    loaded: list[range] = []

    def counted(part: range) -> FeatureStore:
        loaded.append(part)
        return load(part)

    parts = [range(4), range(4, 12)]
    batches = Batches(TRAINING, parts, counted)
    epochs = [[row for step in range(6) for row in rows_of(batches, 6 * epoch + step)] for epoch in range(2)]
    everyone = sorted(tuple(each.tokens[:20].tolist()) for each in conversations.items)
    assert [sorted(epoch) for epoch in epochs] == [everyone, everyone]
    assert epochs[0] != epochs[1]
    assert loaded == [*parts, *parts]


def test_a_step_follows_from_the_seed(load: Load) -> None:
    whole = [range(12)]
    first, second = (Batches(TRAINING, whole, load) for _ in range(2))
    assert rows_of(first, 7) == rows_of(second, 7)
    assert rows_of(Batches(replace(TRAINING, seed=1), whole, load), 7) != rows_of(first, 7)


def test_a_batch_may_be_larger_than_there_are_conversations(load: Load) -> None:
    assert len(rows_of(Batches(replace(TRAINING, batch=64), [range(12)], load), 3)) == 12


def test_targets_follow_their_anchors(load: Load, standard: Standard, checkpoint: Checkpoint) -> None:
    shared = SharedParts.of(checkpoint, torch.device("cpu"), torch.float32)
    batch = Batches(TRAINING, [range(12)], load).at(0, margin_of(PLACES))
    shown = examples(batch, shared, standard, TRAINING, PLACES, step=0)
    assert shown.anchors.shape == (TRAINING.batch, TRAINING.anchors)
    outputs = shared.last_normed(standard.undo_last(batch.features[..., -32:]))
    length = batch.features.shape[1]
    for row, anchors in enumerate(shown.anchors.tolist()):
        assert anchors == list(range(anchors[0], anchors[0] + TRAINING.anchors))
        tokens, answers = batch.tokens[row].tolist(), batch.answers[row].tolist()
        for place, anchor in enumerate(anchors):
            assert shown.following[row, place].tolist() == tokens[anchor + 1 : anchor + 1 + PLACES]
            assert shown.targets.tokens[row, place].tolist() == tokens[anchor + 2 : anchor + 2 + PLACES]
            counted = [all(answers[anchor + 2 : anchor + 3 + j]) for j in range(PLACES)]
            assert shown.targets.counts[row, place].tolist() == counted
            for j in range(PLACES):
                if anchor + 1 + j < length:
                    torch.testing.assert_close(
                        shown.targets.teacher[row, place + j], outputs[row, anchor + 1 + j]
                    )
    assert shown.targets.counts.any(-1).any(-1).all()


def test_tokens_that_cannot_be_guessed_do_not_count(
    load: Load, standard: Standard, checkpoint: Checkpoint
) -> None:
    """Others are told by their places in the draft vocabulary, and taught over it."""
    whole = SharedParts.of(checkpoint, torch.device("cpu"), torch.float32)
    batch = Batches(TRAINING, [range(12)], load).at(0, margin_of(PLACES))
    expected = examples(batch, whole, standard, TRAINING, PLACES, step=0).targets
    ids = expected.tokens[expected.counts].unique()[::2]
    shared = whole.guessing(ids)
    targets = examples(batch, shared, standard, TRAINING, PLACES, step=0).targets
    guessable = torch.isin(expected.tokens, ids)
    assert torch.equal(targets.counts, expected.counts & guessable)
    assert 0 < targets.counts.sum() < expected.counts.sum()
    assert torch.equal(ids[targets.tokens[targets.counts]], expected.tokens[targets.counts])
    torch.testing.assert_close(shared.logits(targets.teacher), whole.logits(targets.teacher)[..., ids])


def test_anchors_vary_with_the_step(load: Load, standard: Standard, checkpoint: Checkpoint) -> None:
    shared = SharedParts.of(checkpoint, torch.device("cpu"), torch.float32)
    batch = Batches(TRAINING, [range(12)], load).at(0, margin_of(PLACES))
    firsts = {
        tuple(examples(batch, shared, standard, TRAINING, PLACES, step).anchors[:, 0].tolist())
        for step in range(4)
    }
    assert len(firsts) == 4
    many = examples(batch, shared, standard, replace(TRAINING, anchors=1000), PLACES, 0)
    assert many.anchors.shape[1] == batch.features.shape[1]

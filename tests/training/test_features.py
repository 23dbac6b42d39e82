"""Features are the outputs of the verifier's layers, whoever computes them beside whom."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kakeya.engine.batch import Segment
from kakeya.engine.sequence import TokenSequence
from kakeya.errors import ConfigError
from kakeya.loading import LoadedModel
from kakeya.training.conversations import Conversation, Conversations
from kakeya.training.features import FeatureReader, FeatureStore, measure_standard, shards
from support.tiny import make_device_backend
from support.trainings import config_of

LENGTHS = [40, 17, 33, 1, 50, 49, 16, 2, 31]


@pytest.fixture(scope="module")
def some() -> list[Conversation]:
    random = np.random.default_rng(0)
    return [
        Conversation(number, random.integers(0, 200, length).astype(np.int32), random.random(length) < 0.5)
        for number, length in enumerate(LENGTHS)
    ]


def all_features(reader: FeatureReader, conversations: list[Conversation]) -> list[Tensor]:
    parts: list[list[Tensor]] = [[] for _ in conversations]
    for place, features in reader.read(conversations):
        parts[place].append(features.clone())
    return [torch.cat(each) for each in parts]


def alone(model: LoadedModel, conversation: Conversation) -> Tensor:
    """One conversation's features, in one segment."""
    pool = model.backend.pool
    sequence, tokens = TokenSequence(pool.allocate(), "", (), None), conversation.tokens.tolist()
    segment = Segment(sequence, sequence.slab.reserve(len(tokens)), tokens, 0, 0)
    with torch.inference_mode():
        hidden = model.backend.launch([segment], (), (0, 1)).result().hidden
    pool.release(sequence.slab)
    return torch.cat([hidden[0], hidden[1]], -1)


def test_each_conversation_has_the_features_it_has_alone(
    model: LoadedModel, some: list[Conversation]
) -> None:
    reader = FeatureReader(model, (0, 1), 62)
    for conversation, features in zip(some, all_features(reader, some), strict=True):
        torch.testing.assert_close(features, alone(model, conversation), atol=1e-4, rtol=1e-4)
    assert model.backend.pool.free_count == model.config.capacity


def test_a_device_computes_the_same(chat_model: Path, model: LoadedModel, some: list[Conversation]) -> None:
    config = config_of(prefill_block=16, max_batch_tokens=48)
    on_device = replace(model, backend=make_device_backend(chat_model, config), config=config)
    theirs = all_features(FeatureReader(on_device, (0, 1), 62), some)
    for mine, its in zip(all_features(FeatureReader(model, (0, 1), 62), some), theirs, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-3, rtol=1e-3)


def test_slabs_are_given_back_when_the_reader_stops(model: LoadedModel, some: list[Conversation]) -> None:
    pieces = FeatureReader(model, (0, 1), 62).read(some)
    next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert model.backend.pool.free_count == model.config.capacity


def test_conversations_longer_than_the_window_are_refused(model: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="conversations of 63 tokens do not fit into the window: sink 2"):
        FeatureReader(model, (0, 1), 63)


def test_the_store_has_standardised_features_padded(model: LoadedModel, some: list[Conversation]) -> None:
    reader = FeatureReader(model, (0, 1), 62)
    raw = all_features(reader, some)
    standard = measure_standard(reader, some)
    everything = torch.cat(raw)
    torch.testing.assert_close(standard.mean, everything.mean(0), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(standard.deviation, everything.std(0, correction=0), atol=1e-3, rtol=1e-3)
    told: list[tuple[int, int]] = []
    lengths = [min(each, 20) for each in LENGTHS]
    store = FeatureStore(reader, standard, some, lengths, lambda *shares: told.append(shares))
    assert told[-1] == (sum(lengths), sum(lengths))
    assert len(store) == len(some)
    batch = store.batch(torch.tensor([1, 3]), margin=4)
    assert batch.tokens.shape == batch.answers.shape == (2, 17 + 4)
    assert batch.tokens[0].tolist() == [*some[1].tokens.tolist(), 0, 0, 0, 0]
    assert batch.answers[1].tolist() == [bool(some[3].answers[0])] + [False] * 20
    assert torch.equal(batch.answers, batch.answers_on_host)
    assert batch.features.dtype is torch.bfloat16
    torch.testing.assert_close(batch.features[0].float(), standard(raw[1]), atol=0.02, rtol=0.02)
    # Behind its end a conversation repeats its last row.
    torch.testing.assert_close(
        batch.features[1].float(), standard(raw[3]).expand(17, -1), atol=0.02, rtol=0.02
    )


def test_shards_fit_into_the_budget(conversations: Conversations) -> None:
    assert shards([10, 10, 10, 30, 5], width=2, budget=120) == [range(3), range(3, 4), range(4, 5)]
    assert shards([10, 10], width=2, budget=10**9) == [range(2)]
    with pytest.raises(
        ConfigError, match="the features of one conversation take 120 bytes, and 119 are free"
    ):
        shards([10, 30], width=2, budget=119)

"""Acceptance is what a session would experience: drafts from its own guesses, one answer at a time."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kakeya.engine.sampler import SampleRequest, sample
from kakeya.kernels.gpu import load_gpu_kernels
from kakeya.loading import LoadedModel
from kakeya.models.checkpoint import Checkpoint
from kakeya.training.acceptance import Examiner, Tally
from kakeya.training.batches import Batches
from kakeya.training.conversations import (
    Answer,
    Conversation,
    Conversations,
    answers_in,
    frequent_tokens,
    seed_of,
    temperature_of,
)
from kakeya.training.features import FeatureReader, FeatureStore, measure_standard
from kakeya.training.network import Attention, Network, Standard, StepDrafts, block_draft
from kakeya.training.settings import NetworkSettings
from kakeya.training.trainer import Frame, Trainer
from kakeya.training.verifier import SharedParts, rotation_tables
from kakeya.types import KernelChoice, SamplingParams
from support.trainings import TRAINING

CPU = torch.device("cpu")
HELD_OUT = 4


def test_an_answer_is_walked_as_generation_proceeds() -> None:
    tally = Tally(4)
    #           0  1  2  3  4  5  6  7  8  9
    accepted = [0, 0, 2, 9, 9, 9, 1, 9, 3, 9]
    # From position 2: two right and one more; from 5: nine, of which four are drafted; then the end.
    tally.walk(Answer(3, 12), accepted)
    assert (tally.steps, tally.tokens) == (2, 8)
    assert (tally.reached, tally.right) == ([2, 2, 2, 1], [2, 2, 1, 1])
    tally.walk(Answer(5, 6), accepted)  # a single token is known before anything is drafted
    assert tally.steps == 2
    assert tally.figures() == {
        "tokens": 8,
        "steps": 2,
        "tokens_per_step": 4.0,
        "acceptance_by_place": [1.0, 1.0, 0.5, 1.0],
    }
    assert Tally(2).figures()["tokens_per_step"] is None
    assert Tally(2).figures()["acceptance_by_place"] == [None, None]


def test_the_end_of_an_answer_bounds_a_draft() -> None:
    tally = Tally(8)
    tally.walk(Answer(1, 5), [8] * 8)
    assert (tally.steps, tally.tokens) == (1, 4 - 1)
    assert (tally.reached, tally.right) == ([1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0])


@pytest.fixture(scope="module")
def shared(checkpoint: Checkpoint) -> SharedParts:
    return SharedParts.of(checkpoint, CPU, torch.float32)


@pytest.fixture(scope="module")
def reader(model: LoadedModel) -> FeatureReader:
    return FeatureReader(model, (0, 1), 40)


@pytest.fixture(scope="module")
def standard(reader: FeatureReader, conversations: Conversations) -> Standard:
    return measure_standard(reader, conversations.items)


@pytest.fixture(scope="module")
def store(reader: FeatureReader, standard: Standard, conversations: Conversations) -> FeatureStore:
    held_out = conversations.items[:HELD_OUT]
    return FeatureStore(reader, standard, held_out, [len(each.tokens) for each in held_out])


@pytest.fixture(scope="module")
def make_network(
    checkpoint: Checkpoint, shared: SharedParts, standard: Standard, store: FeatureStore
) -> Callable[[str], Network]:
    """Networks that were trained on the very conversations, so that some guesses are right."""

    def make(kind: str) -> Network:
        config = NetworkSettings(kind, block=4, layers=1).config_for(checkpoint.config, "it")  # type: ignore[arg-type]
        rotations = rotation_tables(checkpoint.config, 60, CPU)
        frame = Frame(config, shared, standard, rotations, torch.float32)
        trainer = Trainer(frame, TRAINING, Batches(TRAINING, [range(HELD_OUT)], lambda part: store))
        list(trainer.run())
        return frame.network(trainer.averaged)

    return make


def chosen(shared: SharedParts, state: Tensor, conversation: Conversation, position: int, seed: int) -> int:
    sampling = SamplingParams(temperature=temperature_of(conversation.number), seed=seed)
    place = sample(shared.logits(state[None]), [SampleRequest(sampling, position)])[0].token_id
    return int(shared.draft_vocab[place])


def plain_draft(
    network: Network,
    shared: SharedParts,
    features: Tensor,
    conversation: Conversation,
    anchor: int,
    seed: int,
) -> list[int]:
    """What a session's drafter would guess at this point: one anchor, nothing of what comes later."""
    anchors = torch.tensor([[anchor]])
    known = network.features(features[None, : anchor + 1])
    attention = Attention.over(network.history(known), anchors)
    token = shared.embed(torch.tensor([[int(conversation.tokens[anchor + 1])]]))
    guesses: list[int] = []
    if network.config.kind == "block":
        filled = block_draft(network, attention, anchors, known, token)[0, 0]
        return [chosen(shared, x, conversation, anchor + 2 + j, seed) for j, x in enumerate(filled)]
    drafts = StepDrafts(network, attention, anchors, known)
    for place in range(4):
        guesses.append(chosen(shared, drafts.step(token)[0, 0], conversation, anchor + 2 + place, seed))
        token = shared.embed(torch.tensor([[guesses[-1]]]))
    return guesses


@pytest.mark.parametrize("guessable", [1000, 20])
@pytest.mark.parametrize("kind", ["steps", "block"])
def test_drafts_of_all_positions_are_those_of_each(
    kind: str,
    guessable: int,
    conversations: Conversations,
    shared: SharedParts,
    store: FeatureStore,
    make_network: Callable[[str], Network],
) -> None:
    frequent = frequent_tokens(conversations.items, guessable, shared.model.vocab_size)
    shared = shared.guessing(torch.from_numpy(frequent))
    network, held_out = make_network(kind), conversations.items[:HELD_OUT]
    kernels = load_gpu_kernels(CPU, KernelChoice.AUTO)
    walked = Examiner(conversations, held_out, store, shared, kernels).examine(network, [2, 4])
    assert [(each.temperature, each.block) for each in walked] == [
        (0.0, 2), (0.0, 4), (0.7, 2), (0.7, 4), (1.0, 2), (1.0, 4)
    ]  # fmt: skip
    expected = {(each.temperature, each.block): Tally(each.block) for each in walked}
    for place, conversation in enumerate(held_out):
        features = store.batch(torch.tensor([place]), 0).features[0]
        seed, accepted = seed_of(conversations.settings, conversation.number), []
        tokens = conversation.tokens.tolist()
        for anchor in range(len(tokens) - 2):
            guesses = plain_draft(network, shared, features, conversation, anchor, seed)
            came = tokens[anchor + 2 : anchor + 6]
            same = [guess == token for guess, token in zip(guesses, came, strict=False)]
            accepted.append(same.index(False) if False in same else len(same))
        for (temperature, _), tally in expected.items():
            if temperature == temperature_of(conversation.number):
                for answer in answers_in(conversation):
                    tally.walk(answer, accepted)
    assert {(each.temperature, each.block): each.every for each in walked} == expected
    assert sum(each.every.right[1] for each in walked) > 0


def test_answers_that_end_by_themselves_are_told_apart(
    conversations: Conversations,
    shared: SharedParts,
    store: FeatureStore,
    make_network: Callable[[str], Network],
) -> None:
    held_out = conversations.items[:HELD_OUT]
    last = int(held_out[0].tokens[-1])
    ending = replace(conversations, ends=frozenset({last}))
    kernels = load_gpu_kernels(CPU, KernelChoice.AUTO)
    walked = Examiner(ending, held_out, store, shared, kernels).examine(make_network("steps"), [4])
    greedy, warm = walked[0], walked[1]
    assert 0 < greedy.ended.tokens <= greedy.every.tokens
    assert warm.ended.steps == 0 or int(held_out[1].tokens[-1]) == last

"""A small model as proposer: what it reads of a history, and when."""

from pathlib import Path

import pytest

from kakeya.engine.cpu.backend import CpuBackend
from kakeya.engine.proposer import DraftRequest
from kakeya.proposers.model import ModelState, SmallModel
from kakeya.types import KernelChoice, SamplingParams, WeightFormat
from support import tiny

HISTORY = [5, 9, 22, 13, 7] * 8


@pytest.fixture
def proposer(tmp_path: Path) -> SmallModel:
    config = tiny.engine_config(window=60, spare=8, threads=1)
    return SmallModel(tiny.make_backend(tiny.load(tiny.write_llama(tmp_path), config), config), 3, at_once=16)


def guesses(proposer: SmallModel, state: ModelState, patience: float) -> list[int]:
    """How many tokens it guesses each time that it is asked."""
    request = DraftRequest(state, HISTORY, 2, patience=patience)
    return [len(proposer.propose([request])[0]) for _ in range(4)]


def test_a_history_is_read_in_parts_before_the_first_guess(proposer: SmallModel) -> None:
    assert guesses(proposer, proposer.new_state(), patience=1e9) == [0, 0, 2, 2]


def test_a_history_that_takes_longer_than_guesses_save_is_not_read(proposer: SmallModel) -> None:
    guesses(proposer, proposer.new_state(), patience=1e9)  # how long it takes is known from here on
    state = proposer.new_state()
    assert guesses(proposer, state, patience=0.0) == [0] * 4
    assert state.sequence.slab.written == 0
    assert guesses(proposer, state, patience=1e9) == [0, 0, 2, 2]


def test_a_few_tokens_are_always_read(proposer: SmallModel) -> None:
    guesses(proposer, proposer.new_state(), patience=1e9)
    (guess,) = proposer.propose([DraftRequest(proposer.new_state(), HISTORY[:6], 2, patience=0.0)])
    assert len(guess) == 2


@pytest.mark.parametrize("common", [16, 32])
def test_a_short_head_guesses_common_tokens_alone(tmp_path: Path, common: int) -> None:
    """The best of them, whatever penalties and biases say of the others."""
    config = tiny.engine_config(
        window=60, spare=8, threads=1, kernels=KernelChoice.NATIVE, weights=WeightFormat.INT8
    )
    directory = tiny.write_llama(tmp_path)
    whole, short = (tiny.make_backend(tiny.load(directory, config), config) for _ in range(2))
    assert isinstance(short, CpuBackend)
    short.shorten_head(common)
    assert short.vocab_size == common
    history = [*range(tiny.VOCAB)][-20:]  # it reads what it never says
    for bias in ({}, {common - 1: 50.0, common: 100.0}):
        sampling = SamplingParams(repetition_penalty=1.3, frequency_penalty=0.5, logit_bias=bias)
        only = SamplingParams(
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            logit_bias=bias | dict.fromkeys(range(common, tiny.VOCAB), -1e4),
        )
        asked = []
        for backend, params in ((short, sampling), (whole, only)):
            proposer = SmallModel(backend, 3, at_once=32)
            request = DraftRequest(proposer.new_state(), history, 3, params, patience=1e9)
            asked.append(proposer.propose([request])[0])
        assert asked[0] == asked[1]
        assert len(asked[0]) == 3


def test_a_head_that_cannot_be_cut_stays_whole(tmp_path: Path) -> None:
    config = tiny.engine_config(threads=1)
    backend = tiny.make_backend(tiny.load(tiny.write_llama(tmp_path), config), config)
    assert isinstance(backend, CpuBackend)
    backend.shorten_head(32)  # torch's weights
    assert backend.vocab_size == tiny.VOCAB

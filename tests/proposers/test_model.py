"""A small model as proposer: what it reads of a history, and when."""

from pathlib import Path

import pytest

from kakeya.engine.proposer import DraftRequest
from kakeya.proposers.model import ModelState, SmallModel
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

"""Conversations: what is written comes back, what is damaged or foreign is refused by name."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kakeya.errors import ConfigError, CorruptCheckpoint
from kakeya.training.conversations import (
    Answer,
    Conversation,
    Conversations,
    answers_in,
    frequent_tokens,
    loop_end,
    opening_of,
    read_conversations,
    temperature_of,
    trained_length,
    write_conversations,
)
from kakeya.training.settings import DataSettings

SETTINGS = DataSettings(conversations=8, tokens=32, seed=5)
VOCABULARY = 40


def conversation(number: int, tokens: list[int], answers: str) -> Conversation:
    marks = np.array([mark == "a" for mark in answers])
    return Conversation(number, np.array(tokens, dtype=np.int32), marks)


WRITTEN = Conversations(
    SETTINGS,
    "a model",
    frozenset({0, 7}),
    [
        conversation(0, [3, 4, 5, 6], "..aa"),
        conversation(2, [3, 9], ".a"),
        conversation(5, [8, 1, 2, 0, 3, 4, 0], ".aaa.aa"),
        conversation(9, [3, 3, 3], "aaa"),
    ],
)


def read(path: Path, settings: DataSettings = SETTINGS, model: str = "a model") -> Conversations:
    return read_conversations(path, settings, model, VOCABULARY)


def change(
    path: Path, drop: str = "", metadata: dict[str, str] | None = None, **tensors: torch.Tensor
) -> None:
    """Write the file anew with something else in it."""
    with safe_open(path, "pt") as file:
        held = {name: file.get_tensor(name) for name in file.keys() if name != drop}
        known = dict(file.metadata())
    save_file(held | tensors, path, known | (metadata or {}))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_conversations(tmp_path / "data", WRITTEN)
    return tmp_path / "data"


def test_what_is_written_comes_back(path: Path) -> None:
    found = read(path)
    assert (found.settings, found.model, found.ends) == (SETTINGS, "a model", frozenset({0, 7}))
    assert [each.number for each in found.items] == [0, 2, 5, 9]
    for mine, its in zip(WRITTEN.items, found.items, strict=True):
        np.testing.assert_array_equal(mine.tokens, its.tokens)
        np.testing.assert_array_equal(mine.answers, its.answers)
    with safe_open(path, "pt") as file:
        assert file.get_tensor("temperatures").tolist() == pytest.approx([0.0, 0.0, 0.7, 1.0])


def test_those_that_are_missing_or_teach_nothing_are_known() -> None:
    assert WRITTEN.missing() == [1, 3, 4, 6, 7]
    # One has a single token of an answer, one is beyond what was asked for.
    assert [each.number for each in WRITTEN.usable()] == [0, 5]
    assert WRITTEN.token_count == 16


def test_answers_are_found() -> None:
    assert list(answers_in(WRITTEN.items[2])) == [Answer(1, 4), Answer(5, 7)]
    assert list(answers_in(WRITTEN.items[3])) == [Answer(0, 3)]


def test_half_of_the_answers_are_greedy() -> None:
    temperatures = [temperature_of(number) for number in range(100)]
    assert [temperatures.count(each) for each in (0.0, 0.7, 1.0)] == [50, 30, 20]


def test_most_first_users_begin_as_people_do() -> None:
    """Three of four, with each opening in turn, at every temperature; none where there are none."""
    settings = replace(SETTINGS, openings=("What is", "How"))
    openings = [opening_of(settings, number) for number in range(80)]
    assert [openings.count(each) for each in ("", "What is", "How")] == [20, 30, 30]
    for opening in ("", "What is", "How"):
        numbers = [number for number, each in enumerate(openings) if each == opening]
        assert {temperature_of(number) for number in numbers} == {0.0, 0.7, 1.0}
    assert not opening_of(replace(SETTINGS, openings=()), 15)


def test_frequent_tokens_are_those_of_answers() -> None:
    """The most frequent ones, of equals the lower, ascending; low ones where too few occur."""
    said = [conversation(0, [9, 9, 9, 7, 7, 5], "...aaa"), conversation(1, [3, 8, 5], "aaa")]
    assert frequent_tokens(said, 2, 10).tolist() == [5, 7]
    assert frequent_tokens(said, 3, 10).tolist() == [3, 5, 7]
    assert frequent_tokens(said, 6, 10).tolist() == [0, 1, 3, 5, 7, 8]
    assert frequent_tokens(said, 10, 10).tolist() == list(range(10))


def test_loops_are_cut_after_their_first_turns() -> None:
    beginning, loop = list(range(100, 120)), [1, 2, 3] * 30
    looping = np.array(beginning + loop, dtype=np.int32)
    assert loop_end(looping) == 20 + 2 * 3
    assert loop_end(looping[:60]) == 60  # too short to be called a loop
    assert loop_end(np.arange(200, dtype=np.int32)) == 200
    answers = np.ones(len(looping), dtype=bool)
    assert trained_length(Conversation(1, looping, answers)) == 26
    assert trained_length(Conversation(8, looping, answers)) == len(looping)


def test_a_file_that_is_no_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"not this")
    with pytest.raises(CorruptCheckpoint, match="data cannot be read as conversations"):
        read(tmp_path / "data")


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    save_file({"tokens": torch.zeros(1)}, tmp_path / "data")
    with pytest.raises(CorruptCheckpoint, match="is not a kakeya-conversations file of version 1"):
        read(tmp_path / "data")


def test_conversations_of_others_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="was written by another model"):
        read(path, model="another")
    with pytest.raises(ConfigError, match="was written with seed 5, not 6"):
        read(path, replace(SETTINGS, seed=6))
    with pytest.raises(ConfigError, match="was written with tokens 32, not 64"):
        read(path, replace(SETTINGS, tokens=64))


def test_other_openings_are_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="was written with other openings; give --data another file"):
        read(path, replace(SETTINGS, openings=("How",)))


def test_damage_is_named(path: Path) -> None:
    change(path, drop="lengths")
    with pytest.raises(CorruptCheckpoint, match="tensor lengths is missing"):
        read(path)
    change(path, lengths=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(CorruptCheckpoint, match=r"tensor lengths must have shape \(4,\), it is \(2,\)"):
        read(path)
    change(path, lengths=torch.full((4,), 33, dtype=torch.int32))
    with pytest.raises(CorruptCheckpoint, match="lengths must be from 0 to 32"):
        read(path)
    change(path, tokens=torch.full((4, 32), VOCABULARY, dtype=torch.int32))
    with pytest.raises(CorruptCheckpoint, match="tokens must be from 0 to 39"):
        read(path)


@pytest.mark.parametrize("ends", ["[", '["x"]', "3"])
def test_damaged_ends_are_named(path: Path, ends: str) -> None:
    change(path, metadata={"ends": ends})
    with pytest.raises(CorruptCheckpoint, match="the ids that end an answer are damaged"):
        read(path)

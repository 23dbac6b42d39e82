import random

import pytest

from kakeya.bench.recall.material import ABSENT, KINDS, OTHER, UPDATED, Filler, make_trial
from kakeya.bench.text import prose
from kakeya.recall.words import words_of


def encode(text: str) -> list[int]:
    return [ord(each) for each in text]


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


FILLER = Filler(encode, prose())


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_follows_from_its_seed_and_says_what_it_seeks(kind: str) -> None:
    trial = make_trial(kind, 20_000, "3", encode, FILLER, 300)
    assert trial == make_trial(kind, 20_000, "3", encode, FILLER, 300)
    assert trial != make_trial(kind, 20_000, "4", encode, FILLER, 300)
    sought = [decode(trial.history[each.start : each.end]) for each in trial.sought]
    assert all(any(key in said for said in sought) for key in trial.telling.keys)
    assert all(fact.text in decode(trial.history) for fact in trial.telling.facts)
    assert bool(sought) == (kind != ABSENT)


def test_the_newer_of_two_is_sought() -> None:
    trial = make_trial(UPDATED, 2000, "1", encode, FILLER, 300)
    (sought,) = trial.sought
    assert decode(trial.history[: sought.start]).count("access code") == 1
    assert trial.telling.is_right(f"It is {trial.telling.keys[0]}.")
    assert not trial.telling.is_right("It is 1.")


def test_nobody_elses_code_is_right_for_what_was_never_told() -> None:
    telling = KINDS[ABSENT](random.Random(0))
    assert telling.is_right("I do not know.")
    assert not telling.is_right(telling.wrong[3])


@pytest.mark.parametrize("seed", range(12))
def test_other_words_are_others(seed: int) -> None:
    telling = KINDS[OTHER](random.Random(seed))
    said, asked = (set(words_of(text)) for text in (telling.facts[0].text, telling.question))
    assert said & asked <= {"is", "on", "the", "to"}


def test_text_goes_on_as_long_as_it_is_asked_to() -> None:
    chance = random.Random(0)
    assert decode(FILLER.draw(chance, 1000)) in prose()
    assert len(FILLER.draw(chance, 50_000)) == 50_000

"""What is said and what is asked: facts hidden in ordinary text. All of it follows from a seed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kakeya.bench.text import stretch
from kakeya.types import TokenRange


def _listed(words: str) -> list[str]:
    return words.split()


FIRST = _listed("Alice Bruno Clara David Emma Felix Greta Hugo Irene Jonas Karin Liam Maria Nils Olga Paul")
LAST = _listed(
    "Morgan Smith Keller Rossi Novak Silva Tanaka Weber "
    "Fischer Lopez Petrov Larsen Dubois Moreau Kowalski Brown"
)
PLACES = _listed("north south harbour garden tower river museum station")
THINGS = _listed("eggs flour candles soap honey batteries rice lemons")
# Said and asked without a common word, and what may be put in.
OTHER_WORDS = (
    ("Our hound answers to {key}.", "What did they call the dog?", "The dog is called", "Pepper Ziggy Mango"),
    (
        "We fly out on {key} morning.",
        "Which day does the trip start?",
        "It starts on",
        "Monday Friday Sunday",
    ),
    ("Mum cannot stand {key}.", "What food is disliked by the mother?", "She dislikes", "olives celery tofu"),
    (
        "The flat is painted {key} throughout.",
        "What colour has the home?",
        "Its colour is",
        "green purple pink",
    ),
)


@dataclass(frozen=True)
class Fact:
    """A sentence, behind a `lead` that tells nothing. One that is sought answers the question; one that is
    `early` is told before those."""

    text: str
    is_sought: bool = False
    early: bool = False
    lead: str = "\n"


@dataclass(frozen=True)
class Telling:
    """What is told and asked. A right answer has all of `keys` and none of `wrong`. With `pasted` all of it
    is one message, so the text before the question is searched with, too."""

    facts: tuple[Fact, ...]
    question: str
    keys: tuple[str, ...]
    wrong: tuple[str, ...] = ()
    pasted: bool = False

    def is_right(self, answer: str) -> bool:
        return all(key in answer for key in self.keys) and not any(key in answer for key in self.wrong)


def _keys(chance: random.Random, count: int) -> list[str]:
    return [str(key) for key in chance.sample(range(10_000, 100_000), count)]


def _names(chance: random.Random, count: int) -> list[str]:
    """Names that share first and last names with each other."""
    pairs = chance.sample([(first, last) for first in FIRST for last in LAST], count)
    return [f"{first} {last}" for first, last in pairs]


def _code(name: str, key: str) -> str:
    return f"The access code of {name} is {key}."


def _asked(question: str, answer: str) -> str:
    return f"\n\nQuestion: {question}\nAnswer: {answer}"


def _asked_code(name: str) -> str:
    return _asked(f"What is the access code of {name}?", f"The access code of {name} is")


def one(chance: random.Random) -> Telling:
    (key,) = _keys(chance, 1)
    said = f" the secret number is {key}. Remember it, {key} is the secret number."
    question = _asked("What is the secret number?", "The secret number is")
    return Telling((Fact(said, is_sought=True, lead="\nNote this down:"),), question, (key,))


def alike(chance: random.Random, *, count: int) -> Telling:
    names, keys = _names(chance, count), _keys(chance, count)
    facts = [Fact(_code(*pair), is_sought=pair[0] == names[0]) for pair in zip(names, keys, strict=True)]
    return Telling(tuple(facts), _asked_code(names[0]), (keys[0],))


def updated(chance: random.Random) -> Telling:
    (name,), (old, new) = _names(chance, 1), _keys(chance, 2)
    facts = (Fact(_code(name, old), early=True), Fact(_code(name, new), is_sought=True))
    return Telling(facts, _asked_code(name), (new,))


def pasted(chance: random.Random) -> Telling:
    return replace(one(chance), pasted=True)


def listed(chance: random.Random) -> Telling:
    """The same is said of three things, and all of them count."""
    things = tuple(chance.sample(THINGS, 3))
    facts = tuple(Fact(f"Put {thing} on the shopping list.", is_sought=True) for thing in things)
    question = _asked("Which three things are on the shopping list?", "On the shopping list are")
    return Telling(facts, question, things)


def several(chance: random.Random) -> Telling:
    """Two of eight alike facts are asked for at once."""
    names, keys = _names(chance, 8), _keys(chance, 8)
    facts = [Fact(_code(*pair), is_sought=pair[0] in names[:2]) for pair in zip(names, keys, strict=True)]
    question = f"What are the access codes of {names[0]} and {names[1]}?"
    return Telling(tuple(facts), _asked(question, f"The access code of {names[0]} is"), tuple(keys[:2]))


def two_hops(chance: random.Random) -> Telling:
    """The second fact shares no rare word with the question: only the first says which it is."""
    places, keys, (name,) = chance.sample(PLACES, 8), _keys(chance, 8), _names(chance, 1)
    doors = [
        Fact(f"The door code of the {place} office is {key}.", is_sought=place == places[0])
        for place, key in zip(places, keys, strict=True)
    ]
    works = Fact(f"{name} works in the {places[0]} office.", is_sought=True)
    question = f"What is the door code of the office in which {name} works?"
    return Telling((works, *doors), _asked(question, "The door code is"), (keys[0],))


def absent(chance: random.Random) -> Telling:
    """The ninth of nine was never told: no other's code should be the answer."""
    names, keys = _names(chance, 9), _keys(chance, 8)
    facts = tuple(Fact(_code(*pair)) for pair in zip(names, keys, strict=False))
    return Telling(facts, _asked_code(names[8]), (), tuple(keys))


def other_words(chance: random.Random) -> Telling:
    said, question, answer, keys = chance.choice(OTHER_WORDS)
    key = chance.choice(_listed(keys))
    return Telling((Fact(said.format(key=key), is_sought=True),), _asked(question, answer), (key,))


ONE, EIGHT, MANY, UPDATED = "one fact", "one of 8 alike", "one of 64 alike", "told anew"
PASTED, LISTED, SEVERAL = "in a pasted message", "a list in three parts", "two of 8 at once"
HOPS, ABSENT, OTHER = "two hops", "never told", "in other words"
KINDS: dict[str, Callable[[random.Random], Telling]] = {
    ONE: one,
    EIGHT: partial(alike, count=8),
    MANY: partial(alike, count=64),
    UPDATED: updated,
    PASTED: pasted,
    LISTED: listed,
    SEVERAL: several,
    HOPS: two_hops,
    ABSENT: absent,
    OTHER: other_words,
}


@dataclass(frozen=True)
class Trial:
    """A history, the question behind it, and where in the history the facts lie that it is about."""

    telling: Telling
    history: list[int]
    question: list[int]
    sought: tuple[TokenRange, ...]


class Filler:
    """Ordinary text of any length: a stretch of it where it is long enough, else its sentences at random."""

    def __init__(self, encode: Callable[[str], Sequence[int]], text: str) -> None:
        self._whole = list(encode(text))
        self._sentences = [list(encode(f"{each}. ")) for each in text.replace("\n", " ").split(". ") if each]

    @property
    def tokens(self) -> int:
        return len(self._whole)

    def draw(self, chance: random.Random, count: int) -> list[int]:
        if len(self._whole) > count:
            return stretch(self._whole, chance.randrange(len(self._whole) - count), count)
        drawn: list[int] = []
        while len(drawn) < count:
            drawn += chance.choice(self._sentences)
        return drawn[:count]


def make_trial(
    kind: str, distance: int, seed: str, encode: Callable[[str], Sequence[int]], filler: Filler, lead: int
) -> Trial:
    """Facts in ordinary text. The sought one is told `distance` tokens before the question, and `lead` tokens
    or some more behind the beginning. Others lie anywhere, as does a second one that is sought."""
    chance = random.Random(f"{kind} {distance} {seed}")
    telling = KINDS[kind](chance)
    before = lead + chance.randrange(64, 320)
    text = filler.draw(chance, before + distance)
    first = next((fact for fact in telling.facts if fact.is_sought), None)
    places = []
    for fact in telling.facts:
        anywhere = chance.randrange(before if fact.early else before + distance * 3 // 4)
        places.append((before if fact is first else anywhere, fact))
    history: list[int] = []
    sought, done = [], 0
    for place, fact in sorted(places, key=lambda each: each[0]):
        history += text[done:place]
        history += encode(fact.lead)
        said = list(encode(f"{fact.text}\n"))
        if fact.is_sought:
            sought.append(TokenRange(len(history), len(history) + len(said)))
        history, done = history + said, place
    return Trial(telling, history + text[done:], list(encode(telling.question)), tuple(sought))

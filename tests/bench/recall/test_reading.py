from dataclasses import replace

from kakeya.bench.recall.material import ONE, Filler, Telling, Trial, make_trial
from kakeya.bench.recall.reading import Memory, holds, look, random_pages, right_pages, shorten
from kakeya.bench.text import prose
from kakeya.recall.index import Vocabulary
from kakeya.types import TokenRange

MEMORY = Memory(4, 252, 256)


def encode(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def trial(distance: int) -> Trial:
    return make_trial(ONE, distance, "0", encode, Filler(encode, prose()), 300)


def test_a_short_history_stays_whole() -> None:
    told = trial(900)
    short = shorten(told, right_pages(told, MEMORY), MEMORY)
    assert (short.history, short.left_out) == (told.history, 0)


def test_a_long_history_keeps_what_a_session_could_see() -> None:
    told = trial(20_000)
    pages = (*right_pages(told, MEMORY), TokenRange(9000, 9064))
    short = shorten(told, pages, MEMORY)
    assert short.left_out == len(told.history) - len(short.history) > 15_000
    (brought,) = short.ranges
    kept = [token for each in pages for token in told.history[each.start : each.end]]
    assert short.history[brought.start : brought.end] == kept
    assert short.history[:260] == told.history[:260]
    assert short.history[-1000:] == told.history[-1000:]
    assert shorten(told, (), MEMORY).ranges == ()


def test_right_pages_hold_what_is_sought_and_random_ones_do_not() -> None:
    told = trial(20_000)
    assert holds(right_pages(told, MEMORY), told.sought)
    pages = random_pages(told, MEMORY, "1")
    assert sum(each.length for each in pages) == 256
    assert not holds(pages, told.sought)
    assert not holds(pages, ())


def test_in_a_pasted_message_the_text_before_the_question_is_searched_with() -> None:
    """Token 7 is said early and again right before a question about nothing."""
    vocabulary = Vocabulary([f" word{number}".encode() for number in range(20)])
    history = [7, *[place % 5 for place in range(2000)], 7]
    told = Trial(Telling((), "", ()), history, [19], (TokenRange(0, 1),))
    memory = Memory(0, 252, 256)
    assert look(vocabulary, told, memory).ranges == ()
    pasted = replace(told, telling=replace(told.telling, pasted=True))
    assert holds(look(vocabulary, pasted, memory).ranges, pasted.sought)

import pytest

from kakeya.recall.restating import up_to_date
from kakeya.recall.words import terms_of

CODE = "The code of the garage door is 4817."
ANEW = "The code of the garage door is 5522."


def kept(question: str, *texts: str) -> list[int]:
    """Which of the pages stay; the last is the newest."""
    weights = {term: 100 for pair in terms_of(question) for term in pair if term is not None}
    return [page // 2 for page in up_to_date([(2 * each, text) for each, text in enumerate(texts)], weights)]


@pytest.mark.parametrize(
    "newer",
    [
        ANEW,
        "It rains. Since May the code of the garage door is 5522, not 4817. It rains.",
        "the code\tof the garage door is 5522",
        CODE,
    ],
)
def test_what_was_told_anew_is_left_out(newer: str) -> None:
    assert kept("What is the code of the garage door?", f"It was late. {CODE}", newer) == [1]


@pytest.mark.parametrize(
    "newer",
    [
        "The code of the cellar door is 5522.",
        "What is the code of the garage door?",
        "The code of the garage was changed. It is 5522 now, the door is old.",
        "The garage is there.",
    ],
)
def test_what_was_not_said_again_stays(newer: str) -> None:
    assert kept("What is the code of the garage door?", CODE, newer) == [0, 1]


def test_the_newest_of_three_stays_however_well_each_fits() -> None:
    weights = {term: 9 for term, _ in terms_of("code door")}
    assert up_to_date([(1, CODE), (7, ANEW), (3, CODE)], weights) == [7]


def test_things_of_one_list_all_stay() -> None:
    texts = [f"Put {thing} on the shopping list." for thing in ("eggs", "flour", "candles")]
    assert kept("What is on the shopping list?", *texts) == [0, 1, 2]


def test_figures_that_are_asked_for_are_words() -> None:
    rooms = "The code of room 12 is 4817.", "The code of room 14 is 5522."
    assert kept("What is the code of room 12?", *rooms) == [0, 1]
    assert kept("What is the code of the room?", *rooms) == [1]


def test_a_page_with_something_else_that_was_asked_for_stays() -> None:
    older = f"{CODE} The garage key hangs in the hall."
    assert kept("Where is the garage key, and what is the code of the door?", older, ANEW) == [0, 1]


def test_in_scripts_without_spaces_too() -> None:
    assert kept("暗号是什么?", "我的暗号是4817。下雨了。", "下雨了。我的暗号是5522。") == [1]
    assert kept("暗号是什么?", "我的暗号是4817。", "他的暗号是5522。") == [0, 1]


def test_what_goes_on_at_the_next_page_is_the_same_telling() -> None:
    weights = {term: 9 for term, _ in terms_of("code door")}
    assert up_to_date([(1, CODE), (2, ANEW)], weights) == [1, 2]


def test_pages_that_share_nothing_with_the_question_stay() -> None:
    assert kept("Hello?", "It rains.", "It rains.") == [0, 1]
    assert kept("Hello?") == []

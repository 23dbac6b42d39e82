"""A session's index is told of the history as it is asked, and of nothing twice."""

from kakeya.recall.index import RecallIndex, Vocabulary
from kakeya.sessions.remembering import Language, Remembering
from kakeya.types import RecallQuery, TokenRange

START = 0
WORDS = ["", *(f" w{number}" for number in range(1, 2000))]
LANGUAGE = Language(Vocabulary([word.encode() for word in WORDS]), START)


def query(end: int, length: int | None = None, **changes: object) -> RecallQuery:
    fields = {"pinned": 4, "window": 100, "recall": 64, "query_from": end - 3, "end": end}
    return RecallQuery(**{"length": end - 3 if length is None else length, **fields, **changes})


def remembering() -> Remembering:
    return Remembering(lambda: LANGUAGE)


def test_a_page_is_found_by_a_word_of_the_turn() -> None:
    history = [1 + place % 700 for place in range(600)] + [1900] + list(range(800, 1500)) + [1900]
    (found, *_) = remembering().choose(history, query(len(history), query_from=len(history) - 1))
    assert found.start <= 600 < found.end


def test_it_is_told_of_what_is_new_alone_and_of_no_token_beyond_the_prompt() -> None:
    history = list(range(1, 1001))
    memory = remembering()
    for end in (400, 700, 700, 1000):
        memory.choose([*history, 7, 7], query(end))
        assert memory._index is not None
        assert memory._index.length == end
    at_once = RecallIndex(LANGUAGE.vocabulary)
    at_once.extend(history)
    asked = query(1000)
    assert memory.choose(history, asked) == at_once.choose(
        history, asked.length, pinned=4, window=100, recall=64, query_from=asked.query_from
    )


def test_messages_are_marked_where_their_first_token_is() -> None:
    history = [START, *range(1, 50), START, *range(50, 400)]
    memory = remembering()
    memory.choose(history, query(len(history)))
    assert memory._index is not None
    assert memory._index.messages == (0, 50)
    unmarked = Remembering(lambda: Language(LANGUAGE.vocabulary, None))
    unmarked.choose(history, query(len(history)))
    assert unmarked._index is not None
    assert unmarked._index.messages == ()


def test_what_is_to_be_remembered_comes_first() -> None:
    history = list(range(1, 1001))
    kept = TokenRange(300, 310)
    assert kept in remembering().choose(history, query(1000, remembered=(kept,)))


def test_it_knows_what_it_takes() -> None:
    memory = remembering()
    assert memory.nbytes == 0
    memory.choose(list(range(1000)), query(1000))
    assert memory.nbytes > 0


def test_a_fork_goes_on_by_itself() -> None:
    history = list(range(1, 1001))
    memory = remembering()
    assert memory.fork()._index is None  # nothing was asked yet
    memory.choose(history, query(500))
    copy = memory.fork()
    memory.choose(history, query(1000))
    assert copy._index is not None
    assert copy._index.length == 500
    assert copy.choose(history, query(1000)) == memory.choose(history, query(1000))

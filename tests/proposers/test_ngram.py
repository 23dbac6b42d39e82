"""Looking up: the index finds what a search of the whole history finds, and the engine's tokens stay."""

from collections.abc import Sequence

from hypothesis import given, strategies as st

from kakeya.engine.proposer import DraftRequest
from kakeya.proposers.ngram import LookUp, LookUpState, TokenIndex

FEW = st.lists(st.integers(0, 3), max_size=200)


def index_of(tokens: Sequence[int]) -> TokenIndex:
    index = TokenIndex()
    index.extend(tokens)
    return index


def agreement(tokens: Sequence[int], place: int) -> int:
    return next((back for back in range(place + 1) if tokens[place - back] != tokens[-1 - back]), place + 1)


@given(FEW)
def test_it_finds_a_place_where_the_last_tokens_came_before(tokens: list[int]) -> None:
    follow = list(index_of(tokens).after(tokens, 1))
    newest = [place for place in range(len(tokens) - 1) if agreement(tokens, place) >= 3][-7:]
    if not newest:
        assert follow == []
        return
    most = max(min(agreement(tokens, place), 16) for place in newest)
    best = max(place for place in newest if min(agreement(tokens, place), 16) == most)
    assert follow == [tokens[best + 1]]


@given(FEW, st.lists(st.integers(0, 200), max_size=6))
def test_cuts_make_no_difference(tokens: list[int], cuts: list[int]) -> None:
    grown = TokenIndex()
    for cut in sorted(cuts):
        grown.extend(tokens[len(grown) : cut])
    grown.extend(tokens[len(grown) :])
    assert list(grown.after(tokens, 4)) == list(index_of(tokens).after(tokens, 4))


@given(FEW, FEW, st.integers(0, 200))
def test_what_was_taken_back_leaves_no_trace(tokens: list[int], other: list[int], length: int) -> None:
    index = index_of(tokens + other)
    twin = index.copy()
    index.rollback(min(length, len(tokens)))
    again = tokens[: min(length, len(tokens))] + other
    index.extend(again[len(index) :])
    assert list(index.after(again, 4)) == list(index_of(again).after(again, 4))
    assert list(twin.after(tokens + other, 4)) == list(index_of(tokens + other).after(tokens + other, 4))


def ask(tokens: Sequence[int], limit: int = 4, state: LookUpState | None = None, **more: object) -> list[int]:
    proposer = LookUp(limit)
    (guess,) = proposer.propose([DraftRequest(state or proposer.new_state(), tokens, limit, **more)])
    return list(guess)


def test_a_guess_is_what_followed_and_no_longer_than_asked() -> None:
    assert ask([1, 2, 3, 7, 8, 9, 6, 1, 2, 3]) == [7, 8, 9, 6]
    assert ask([1, 2, 3, 7, 8, 9, 6, 1, 2, 3], limit=2) == [7, 8]
    assert ask([1, 2, 3, 4]) == []
    assert ask([]) == []


def test_a_loop_is_guessed_round_and_round() -> None:
    assert ask([9, 1, 2, 1, 2, 1, 2], limit=5) == [1, 2, 1, 2, 1]


def test_what_left_the_window_long_ago_is_found() -> None:
    assert ask([5, 6, 7, 8, *range(100, 50_000), 5, 6, 7], limit=1) == [8]


def test_memory_grows_by_a_few_bytes_a_token() -> None:
    index = index_of(range(100_000))
    held = sum(part.itemsize * len(part) for part in (index._tokens, index._before, index._heads))
    assert held <= 16 * 100_000 + 1024


def test_a_state_forks_and_goes_back_with_its_session() -> None:
    state = LookUpState()
    tokens = [1, 2, 3, 7, 9, 1, 2, 3]
    assert ask(tokens, state=state)[:2] == [7, 9]
    twin = state.fork()
    state.rollback(4)
    assert ask([1, 2, 3, 7, 1, 2, 3], state=state)[:1] == [7]
    assert ask([*tokens, 7], state=twin)[:1] == [9]
    assert state.export() == {}
    state.close()


def test_a_predicted_answer_is_guessed_from_its_first_token_on() -> None:
    prediction, prompt = [20, 21, 22, 23, 24, 25], [1, 2, 3]
    state = LookUpState()

    def guess(answer: list[int]) -> list[int]:
        return ask(prompt + answer, limit=3, state=state, prompt_length=3, prediction=prediction)

    assert guess([]) == [20, 21, 22]
    assert guess([20]) == [21, 22, 23]
    assert guess([30]) == []
    assert guess([30, 21, 22, 23]) == [24, 25], "it is found again after a change"
    assert guess([30, 21, 22, 23, 24, 25]) == [], "nothing comes after its end"


def test_what_a_session_takes_back_is_not_found_again() -> None:
    """Its next tokens are others: a guess must come from them."""
    proposer, begun = LookUp(3), [4, 5, 6, 1, 2, 3]
    state = proposer.new_state()
    proposer.propose([DraftRequest(state, [*begun, 7, 8, 9, 0], 3)])
    state.rollback(len(begun))
    (guess,) = proposer.propose([DraftRequest(state, [*begun, 11, 12, 13, 1, 2, 3], 3)])
    assert list(guess) == [11, 12, 13]

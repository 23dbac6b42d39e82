"""What ends a generate: a least length, an EOS that is ignored, and stop tokens of its own."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kakeya.engine.constraint import LeastLength, allows
from kakeya.engine.engine import Engine
from kakeya.errors import InvalidArgument
from kakeya.types import DoneEvent, SamplingParams, StopReason, TokenEvent
from support import tiny
from support.engines import FunctionProposer, say

MakeEngine = Callable[..., Engine]
PROMPT = [5, 9, 22, 13, 7]
EOS, STOP = 1, 30
# Left alone it would say EOS at once, and STOP if that may not come.
EAGER: dict[str, Any] = {"logit_bias": {EOS: 1e4, STOP: 5e3}}


def said(
    engine: Engine, *, most: int = 12, eos: Sequence[int] = (EOS,), **settings: Any
) -> tuple[list[int], DoneEvent]:
    """The tokens, which are the history, and how it ended."""
    sequence = engine.open("someone", list(eos))
    engine.append(sequence, PROMPT)
    events = list(engine.generate(sequence, most, SamplingParams(**settings)))
    tokens = [event.token_id for event in events if isinstance(event, TokenEvent)]
    assert engine.read(sequence, lambda each: each.tokens.tolist()) == PROMPT + tokens
    done = events[-1]
    assert isinstance(done, DoneEvent)
    return tokens, done


def test_a_stop_token_ends_is_emitted_and_kept(make_engine: MakeEngine) -> None:
    engine = make_engine()
    tokens, done = said(engine, eos=[], logit_bias={STOP: 1e4}, stop_token_ids=[STOP, 44])
    assert (tokens, done.stop_reason) == ([STOP], StopReason.EOS)
    tokens, done = said(engine, eos=[EOS], **EAGER, stop_token_ids=[STOP])
    assert (tokens, done.stop_reason) == ([EOS], StopReason.EOS), "the session's own EOS still ends"


def test_an_ignored_eos_comes_and_ends_nothing(make_engine: MakeEngine) -> None:
    tokens, done = said(make_engine(), **EAGER, ignore_eos=True)
    assert (tokens, done.stop_reason) == ([EOS] * 12, StopReason.MAX_TOKENS)
    tokens, done = said(make_engine(), **EAGER, ignore_eos=True, stop_token_ids=[EOS])
    assert tokens == [EOS], "named as a stop token, it ends all the same"


@pytest.mark.parametrize("least", [1, 5, 12])
def test_nothing_that_ends_comes_before_the_least_length(make_engine: MakeEngine, least: int) -> None:
    tokens, done = said(make_engine(), **EAGER, min_tokens=least, stop_token_ids=[STOP])
    assert len(tokens) == min(least + 1, 12)
    assert not {EOS, STOP} & set(tokens[:least])
    assert tokens[least:] == [EOS][: 12 - least]
    assert done.stop_reason is (StopReason.MAX_TOKENS if least == 12 else StopReason.EOS)


def test_the_least_length_takes_the_best_of_the_rest(make_engine: MakeEngine) -> None:
    engine = make_engine()
    forbidden, _ = said(engine, logit_bias={EOS: -1e4}, most=6)
    tokens, _ = said(engine, logit_bias={EOS: 1e4}, min_tokens=6)
    assert tokens == [*forbidden, EOS]


def test_without_an_end_the_least_length_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    plain, _ = said(engine, eos=[])
    assert said(engine, eos=[], min_tokens=8)[0] == plain
    assert said(engine, eos=[EOS], ignore_eos=True, min_tokens=8)[0] == plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong_at", [None, 0, 1, 2])
def test_drafts_change_nothing(make_engine: MakeEngine, temperature: float, wrong_at: int | None) -> None:
    settings = {**EAGER, "temperature": temperature, "min_tokens": 7, "stop_token_ids": [STOP]}
    expected, _ = said(make_engine(), **settings)
    assert len(expected) == 8

    def guess(tokens: Sequence[int]) -> list[int]:
        # Behind the answer come ends, and an end is guessed where none may come.
        draft = [*expected, EOS, STOP, EOS][len(tokens) - len(PROMPT) :][:3]
        if wrong_at is not None:
            draft[wrong_at] = EOS
        return draft

    tokens, done = said(make_engine(None, FunctionProposer(guess)), **settings)
    assert tokens == expected
    assert done.accepted_draft_tokens > 0 or wrong_at == 0


def test_neighbours_with_other_ends_change_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny.engine_config(window=64, capacity=8))
    ends = [{"min_tokens": 9}, {"ignore_eos": True}, {"stop_token_ids": [STOP]}, {}]
    alone = [said(engine, **EAGER, **each)[0] for each in ends]
    sequences = [engine.open(f"owner {number}", [EOS]) for number in range(len(ends))]
    for sequence in sequences:
        engine.append(sequence, PROMPT)
    streams = [
        engine.generate(sequence, 12, SamplingParams(**EAGER, **each))
        for sequence, each in zip(sequences, ends, strict=True)
    ]
    together = [[event.token_id for event in stream if isinstance(event, TokenEvent)] for stream in streams]
    assert together == alone


def test_the_next_generate_has_ends_of_its_own(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [EOS])
    assert say(engine, sequence, PROMPT, 4, SamplingParams(**EAGER, ignore_eos=True)) == [EOS] * 4
    assert say(engine, sequence, [4], 4, SamplingParams(**EAGER)) == [EOS]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_tokens": 13}, "min_tokens must be at most max_tokens, 12, got 13"),
        ({"min_tokens": -1}, "min_tokens must be in"),
        ({"stop_token_ids": [tiny.VOCAB]}, "not in the vocabulary"),
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    make_engine: MakeEngine, settings: dict[str, Any], message: str
) -> None:
    engine = make_engine()
    with pytest.raises(InvalidArgument, match=message):
        said(engine, **settings)
    assert said(engine, **EAGER)[0] == [EOS]


class OnlyThis:
    """Allows the tokens of one list in turn, then nothing but EOS."""

    def __init__(self, *tokens: int) -> None:
        self.left = [*tokens, EOS]

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        rows = [[*self.left[row:], EOS][0] for row in range(len(draft) + 1)]
        return [(1 << token).to_bytes(tiny.VOCAB, "little") for token in rows]

    def advance(self, token_ids: Sequence[int]) -> None:
        self.left = self.left[len(token_ids) :]

    @property
    def is_complete(self) -> bool:
        return len(self.left) <= 1


def test_a_constraint_that_leaves_only_the_end_goes_before_the_least_length(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [EOS])
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, 12, SamplingParams(min_tokens=10), constraint=OnlyThis(7, 8))
    assert [event.token_id for event in stream if isinstance(event, TokenEvent)] == [7, 8, EOS]


def test_a_complete_constraint_ends_although_eos_is_ignored(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [EOS])
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, 12, SamplingParams(ignore_eos=True), constraint=OnlyThis(7, 8))
    assert [event.token_id for event in stream if isinstance(event, TokenEvent)] == [7, 8]


def test_each_row_of_a_draft_counts_towards_the_least_length() -> None:
    least = LeastLength(2, [1, 3], vocab_size=10, inner=None)
    assert [allows(mask, 3) for mask in least.masks([5, 5, 5])] == [False, False, True, True]
    assert least.masks(())[0] == bytes([0b11110101, 0b11])
    least.advance([5])
    assert not least.is_over
    assert [allows(mask, 1) for mask in least.masks([5])] == [False, True]
    least.advance([5])
    assert least.is_over

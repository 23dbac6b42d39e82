"""The constraint seam: what may be chosen is, what may not never is, and nobody else notices."""

import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from kakeya.engine.constraint import allows, is_last
from kakeya.engine.engine import Engine
from kakeya.engine.sampler import SampleRequest, sample
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.stream import EventStream
from kakeya.errors import StepFailed
from kakeya.types import DoneEvent, Numerics, SamplingParams, StopReason, TokenEvent
from support import tiny
from support.constraints import EOS, Stairs
from support.engines import GREEDY, FunctionProposer, say, tokens_of
from support.reference import Oracle

MakeEngine = Callable[..., Engine]
PROMPT = [5, 9, 22, 13, 7]
LIVELY = SamplingParams(temperature=20.0, seed=8)  # the tiny model repeats itself when it is cooler


def constrained(
    engine: Engine,
    sequence: TokenSequence,
    constraint: object,
    count: int = 20,
    sampling: SamplingParams = GREEDY,
) -> EventStream:
    engine.append(sequence, PROMPT)
    return engine.generate(sequence, count, sampling, constraint=constraint)


def end_of(events: list[object]) -> DoneEvent:
    last = events[-1]
    assert isinstance(last, DoneEvent)
    return last


def spoken(events: list[object]) -> list[int]:
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


# The sampler.

VARIANTS = [
    SamplingParams(),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(logit_bias={3: 1e4, 7: 50.0}),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=50.0, top_k=40),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=2.0, min_p=0.3, presence_penalty=1.0),
    SamplingParams(temperature=1e-9),
]


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=12, max_size=12),
    st.sets(st.integers(0, 11), min_size=1),
    st.sampled_from(VARIANTS),
    st.integers(0, 2**32),
)
def test_a_masked_token_is_never_chosen(
    row: list[float], allowed: set[int], params: SamplingParams, position: int
) -> None:
    mask = sum(1 << token for token in allowed).to_bytes(2, "little")
    request = SampleRequest(params, position, [0, 3, 3], mask)
    assert sample(torch.tensor([row]), [request])[0].token_id in allowed


@pytest.mark.parametrize("params", VARIANTS, ids=str)
def test_a_mask_that_allows_everything_changes_nothing(params: SamplingParams) -> None:
    rows = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
    plain = [SampleRequest(params, position, [0, 3]) for position in range(64)]
    masked = [SampleRequest(params, position, [0, 3], b"\xff\xff") for position in range(64)]
    assert sample(rows, masked) == sample(rows, plain)


def test_a_masked_choice_follows_the_distribution_of_what_is_left() -> None:
    row, draws = torch.tensor([0.3, 2.0, -0.5, 1.0]), 4000
    requests = [SampleRequest(SamplingParams(temperature=1.0), at, (), b"\x0d") for at in range(draws)]
    chosen = sample(row.expand(draws, -1), requests)
    counts = np.bincount([each.token_id for each in chosen], minlength=4) / draws
    expected = row[[0, 2, 3]].softmax(0).numpy()
    assert counts[1] == 0
    assert counts[[0, 2, 3]] == pytest.approx(expected, abs=0.03)


def test_greedy_takes_the_best_of_what_is_allowed() -> None:
    rows = torch.tensor([[3.0, 1.0, 2.0, 2.0]])
    assert sample(rows, [SampleRequest(SamplingParams(), 0, (), b"\x0e")]) == [TokenEvent(2)]


@pytest.mark.parametrize("mask", [b"", b"\x00", b"\xf0", b"\x00\xff"], ids=repr)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_mask_without_a_token_of_the_vocabulary_fails_the_step(mask: bytes, temperature: float) -> None:
    request = SampleRequest(SamplingParams(temperature=temperature), 0, (), mask)
    with pytest.raises(StepFailed, match="leaves no token"):
        sample(torch.zeros(1, 4), [request])


def test_allowed_tokens_that_are_impossible_fail_the_step() -> None:
    row = torch.tensor([[0.0, -torch.inf]])
    with pytest.raises(StepFailed, match="leaves no token"):
        sample(row, [SampleRequest(SamplingParams(), 0, (), b"\x02")])


def test_log_probabilities_are_those_of_the_whole_row() -> None:
    row = torch.tensor([3.0, 1.0, 2.0, -1.0])
    params = SamplingParams(logprobs=True, top_logprobs=2)
    [chosen] = sample(row[None], [SampleRequest(params, 0, (), b"\x0a")])
    reference = row.double().log_softmax(0)
    assert chosen.token_id == 1
    assert chosen.logprob == pytest.approx(float(reference[1]), abs=1e-12)
    assert [each.token_id for each in chosen.top_logprobs] == [0, 2]


@given(st.integers(0, 100), st.binary(max_size=12))
def test_a_bit_stands_for_a_token(token_id: int, mask: bytes) -> None:
    assert allows(mask, token_id) == bool(int.from_bytes(mask, "little") >> token_id & 1)


def test_the_last_token_is_an_eos_or_leaves_no_room_for_one() -> None:
    whole, half = Stairs(0), Stairs(1)
    assert is_last(EOS, [EOS], None)
    assert not is_last(5, [EOS], None)
    assert not is_last(5, [EOS], half)
    assert not is_last(5, [EOS], whole)  # an EOS may still come
    assert is_last(5, [], whole)
    assert is_last(5, [9], whole)


# The engine.


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(temperature=1.3, top_k=5, repetition_penalty=1.2, seed=1),
        SamplingParams(logit_bias={40: 1e4}),
    ],
    ids=["greedy", "sampled", "filtered", "biased"],
)
def test_the_answer_obeys_and_ends_with_an_eos(make_engine: MakeEngine, sampling: SamplingParams) -> None:
    engine, constraint = make_engine(), Stairs(12)
    events = list(constrained(engine, engine.open("someone", [EOS]), constraint, 40, sampling))
    tokens = spoken(events)
    assert len(tokens) == 13
    assert tokens[-1] == EOS
    assert constraint.obeyed_by(tokens)
    assert constraint.told == tokens
    assert end_of(events).stop_reason is StopReason.EOS


def test_the_constraint_is_what_made_the_difference(make_engine: MakeEngine, oracle: Oracle) -> None:
    assert not Stairs().obeyed_by(oracle.greedy(PROMPT, 20, 2, 8))


def test_greedy_is_the_best_of_the_allowed_at_every_step(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine, constraint = make_engine(), Stairs()
    tokens = tokens_of(constrained(engine, engine.open("someone", []), constraint, 15))
    history = list(PROMPT)
    for index, token in enumerate(tokens):
        row = oracle.logits(history, 2, 8)[-1]
        allowed = constraint.allowed_after(tokens[:index])
        assert token == max(allowed, key=lambda each: float(row[each]))
        history.append(token)


@pytest.mark.parametrize("eos", [[], [9]], ids=["no EOS", "another EOS"])
def test_a_session_without_the_constraints_eos_ends_when_it_is_complete(
    make_engine: MakeEngine, eos: list[int]
) -> None:
    engine, constraint = make_engine(), Stairs(6)
    constraint.eos = 2 if eos else EOS
    sequence = engine.open("someone", eos)
    events = list(constrained(engine, sequence, constraint, 40, SamplingParams(logit_bias={9: -1e4})))
    assert len(spoken(events)) == 6
    assert end_of(events).stop_reason is StopReason.EOS
    assert engine.read(sequence, lambda s: s.tokens.tolist()) == PROMPT + spoken(events)


def test_the_token_limit_still_holds(make_engine: MakeEngine) -> None:
    engine = make_engine()
    events = list(constrained(engine, engine.open("someone", [EOS]), Stairs(12), 5))
    assert len(spoken(events)) == 5
    assert end_of(events).stop_reason is StopReason.MAX_TOKENS


def test_the_next_generate_is_free_again(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    first = tokens_of(constrained(engine, sequence, Stairs(), 7))
    assert say(engine, sequence, [4], 6) == oracle.greedy([*PROMPT, *first, 4], 6, 2, 8)


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.7, seed=3, logit_bias={8: 5.0})])
def test_log_probabilities_stay_the_models_own(
    make_engine: MakeEngine, oracle: Oracle, sampling: SamplingParams
) -> None:
    engine = make_engine()
    asking = SamplingParams(**{**sampling.__dict__, "top_logprobs": 3})
    events = list(constrained(engine, engine.open("someone", []), Stairs(), 10, asking))
    history = list(PROMPT)
    for event in events:
        if isinstance(event, TokenEvent):
            reference = oracle.logits(history, 2, 8)[-1].double().log_softmax(0)
            assert event.logprob == pytest.approx(float(reference[event.token_id]), abs=1e-4)
            best = reference.topk(3).values.tolist()
            assert [each.logprob for each in event.top_logprobs] == pytest.approx(best, abs=1e-4)
            history.append(event.token_id)
    assert len(history) == len(PROMPT) + 10


# Drafts.


@pytest.mark.unwatched
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=1.0, seed=5, presence_penalty=0.5)])
@pytest.mark.parametrize("eos", [[EOS], []], ids=["EOS", "no EOS"])
@pytest.mark.parametrize("wrong_at", [None, 0, 1, 2])
def test_drafts_never_change_a_constrained_answer(
    make_engine: MakeEngine, sampling: SamplingParams, eos: list[int], wrong_at: int | None
) -> None:
    plain = make_engine()
    expected = tokens_of(constrained(plain, plain.open("someone", eos), Stairs(14), 40, sampling))

    def guess(tokens: Sequence[int]) -> list[int]:
        said = len(tokens) - len(PROMPT)
        draft = [*expected, EOS, EOS, EOS][said : said + 3]
        if wrong_at is not None:
            draft[wrong_at] = (draft[wrong_at] + 20) % tiny.VOCAB  # too high a step
        return draft

    engine, constraint = make_engine(None, FunctionProposer(guess)), Stairs(14)
    events = list(constrained(engine, engine.open("someone", eos), constraint, 40, sampling))
    assert spoken(events) == expected
    assert constraint.told == expected
    assert max(map(len, constraint.asked)) == 3
    done = end_of(events)
    assert done.stop_reason is StopReason.EOS
    assert done.accepted_draft_tokens > 0 or wrong_at == 0


def test_the_session_goes_on_well_after_drafts_ran_past_the_end(
    make_engine: MakeEngine, oracle: Oracle
) -> None:
    plain = make_engine()
    expected = tokens_of(constrained(plain, plain.open("someone", []), Stairs(5), 40))
    proposer = FunctionProposer(lambda tokens: [*expected, 4, 4, 4][len(tokens) - len(PROMPT) :])
    engine = make_engine(None, proposer)
    sequence = engine.open("someone", [])
    assert tokens_of(constrained(engine, sequence, Stairs(5), 40)) == expected
    assert say(engine, sequence, [4], 6) == oracle.greedy([*PROMPT, *expected, 4], 6, 2, 8)


# Company.


def test_neighbours_notice_nothing(decoder_exact: Engine) -> None:
    engine = decoder_exact
    alone = say(engine, engine.open("alone", []), PROMPT, 40, LIVELY)
    lonely = tokens_of(constrained(engine, engine.open("lonely", []), Stairs(), 40, LIVELY))
    free, bound = engine.open("free", []), engine.open("bound", [])
    engine.append(free, PROMPT)
    bound_stream = constrained(engine, bound, Stairs(), 40, LIVELY)
    free_stream = engine.generate(free, 40, LIVELY)
    together: tuple[list[int], list[int]] = ([], [])
    for _ in range(41):
        for tokens, stream in zip(together, (free_stream, bound_stream), strict=True):
            event = stream.next_event(10)
            if isinstance(event, TokenEvent):
                tokens.append(event.token_id)
    assert together == (alone, lonely)
    assert len(set(alone)) > 15
    assert len(set(lonely)) > 15


@pytest.fixture
def decoder_exact(make_engine: MakeEngine) -> Engine:
    return make_engine(tiny.engine_config(window=64, numerics=Numerics.EXACT))


# Cancel.


def test_a_cancel_keeps_exactly_what_was_taken(make_engine: MakeEngine, oracle: Oracle) -> None:
    engine, constraint = make_engine(), Stairs()
    sequence = engine.open("someone", [EOS])
    stream = constrained(engine, sequence, constraint, 1000)
    kept = [e.token_id for e in (stream.next_event(10) for _ in range(4)) if isinstance(e, TokenEvent)]
    time.sleep(0.05)  # the engine runs as far ahead as it may
    stream.cancel()
    kept += tokens_of(stream)
    assert constraint.obeyed_by(kept)
    assert engine.read(sequence, lambda s: (s.tokens.tolist(), s.request)) == (PROMPT + kept, None)
    again = tokens_of(engine.generate(sequence, 5, GREEDY))
    assert again == oracle.greedy(PROMPT + kept, len(again), 2, 8)


# Failures.


class Faulty(Stairs):
    """Breaks in one of its calls once it knows of `count` tokens."""

    def __init__(self, where: str, count: int, error: Exception) -> None:
        super().__init__()
        self.where, self.count, self.error = where, count, error

    def _break(self, where: str) -> None:
        if where == self.where and len(self.told) >= self.count:
            raise self.error

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        self._break("masks")
        return super().masks(draft)

    def advance(self, token_ids: Sequence[int]) -> None:
        self._break("advance")
        super().advance(token_ids)

    @property
    def is_complete(self) -> bool:
        self._break("is_complete")
        return False


@pytest.mark.parametrize("where", ["masks", "advance", "is_complete"])
@pytest.mark.parametrize("count", [0, 5])
@pytest.mark.parametrize("error", [ValueError("a bug"), StepFailed("no way on: a bug")], ids=repr)
@pytest.mark.slow
def test_a_constraint_that_raises_fails_its_own_request_only(
    make_engine: MakeEngine, oracle: Oracle, where: str, count: int, error: Exception
) -> None:
    # With so many spare slots all three run side by side without being read.
    engine = make_engine(tiny.engine_config(spare=60, numerics=Numerics.EXACT))
    alone = say(engine, engine.open("alone", []), PROMPT, 20, LIVELY)
    before, bad, after = (engine.open(name, []) for name in ("a", "b", "c"))
    for sequence in (before, after):
        engine.append(sequence, PROMPT)
    others = [engine.generate(before, 20, LIVELY)]
    stream = constrained(engine, bad, Faulty(where, count, error), 20)
    others.append(engine.generate(after, 20, LIVELY))
    with pytest.raises(StepFailed, match="a bug"):
        tokens_of(stream)
    for other in others:
        assert tokens_of(other) == alone
    kept = engine.read(bad, lambda s: s.tokens.tolist())[len(PROMPT) :]
    assert len(kept) <= count
    assert say(engine, bad, [4], 5) == oracle.greedy([*PROMPT, *kept, 4], 5, 2, 8)


def test_a_constraint_without_a_way_on_fails_its_request(make_engine: MakeEngine) -> None:
    class DeadEnd(Stairs):
        def allowed_after(self, tokens: Sequence[int]) -> list[int]:
            return super().allowed_after(tokens) if len(tokens) < 3 else []

    engine = make_engine()
    with pytest.raises(StepFailed, match="leaves no token"):
        tokens_of(constrained(engine, engine.open("someone", [EOS]), DeadEnd(), 20))

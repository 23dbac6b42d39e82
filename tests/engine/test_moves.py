"""Sequences that leave their slabs and come back, beside the running engine."""

import threading
from array import array
from collections.abc import Callable

import pytest
from torch import Tensor

from kakeya.config import CacheConfig
from kakeya.engine.engine import Engine
from kakeya.engine.moving import copy_shape, rebuild_start, used_slots
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.slab import SlabGeometry
from kakeya.engine.state import SequenceState
from kakeya.errors import NoFreeSlab, SessionBusy, Unavailable
from kakeya.types import DType
from support import tiny
from support.engines import FunctionProposer, say

MakeEngine = Callable[..., Engine]
PROMPT = [5, 9, 22, 13, 7] * 5


def away(engine: Engine, sequence: TokenSequence) -> tuple[SequenceState, "array[int]"]:
    """Take its slab, as somebody who puts it to sleep does."""
    state = engine.moves.lift(engine.moves.lend(sequence))
    engine.moves.leave(sequence)
    return state, sequence.tokens


def test_it_goes_on_where_it_was(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny.engine_config(capacity=2))
    stays, leaves = engine.open("someone", [], 3), engine.open("someone", [], 3)
    assert say(engine, stays, PROMPT, 4) == say(engine, leaves, PROMPT, 4)
    state, tokens = away(engine, leaves)
    stranger = engine.open("another", [])
    say(engine, stranger, [8] * 30, 3)  # has written all over its slab
    engine.close(stranger)
    back = engine.moves.prepare("someone", (), 3)
    assert engine._backend.pool.free_count == 0
    assert engine.moves.enter(back, state, tokens).result(30) is None
    assert say(engine, back, [4, 6], 9) == say(engine, stays, [4, 6], 9)


def test_no_call_but_lend_waits_for_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(tiny.engine_config(capacity=1))
    sequence = engine.open("someone", [])
    say(engine, sequence, PROMPT, 4)
    lent, tokens = engine.moves.lend(sequence), sequence.tokens
    over = threading.Event()
    busy = engine._inbox.post(lambda: over.wait(20))
    try:
        state = engine.moves.lift(lent)
        with pytest.raises(NoFreeSlab):
            engine.moves.prepare("someone", (), 2)
        engine.moves.leave(sequence)
        back = engine.moves.prepare("someone", (), 2)
        entered = engine.moves.enter(back, state, tokens)
        assert not entered.done()
        assert (back.committed, back.slab.committed) == (len(PROMPT) + 4, len(PROMPT) + 3)
    finally:
        over.set()
    assert busy.result(), "somebody waited for the engine"
    assert engine.append(back, [3]) == len(PROMPT) + 5
    assert entered.done()


def test_an_engine_that_cannot_take_it_in_frees_the_slab(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny.engine_config(capacity=1), FunctionProposer(lambda tokens: []))
    sequence = engine.open("someone", [])
    say(engine, sequence, PROMPT, 4)
    state, tokens = away(engine, sequence)

    def refuse(_: object) -> None:
        raise RuntimeError("no")

    back = engine.moves.prepare("someone", (), 2)
    with monkeypatch.context() as broken:
        broken.setattr(engine._drafter, "restore", refuse)
        entered = engine.moves.enter(back, state, tokens)
        with pytest.raises(RuntimeError, match="no"):
            engine.append(back, [3])
    assert isinstance(entered.exception(), RuntimeError)
    assert engine._backend.pool.free_count == 1
    again = engine.moves.prepare("someone", (), 2)
    engine.moves.enter(again, state, tokens)
    assert engine.append(again, [3]) == len(PROMPT) + 5


def test_nobody_is_prepared_while_the_engine_drains(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.drain(30)
    with pytest.raises(Unavailable, match="draining"):
        engine.moves.prepare("someone", (), 2)


def test_the_engine_copies_into_memory_that_is_at_hand(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    say(engine, sequence, PROMPT, 4)
    given: list[tuple[int, ...]] = []
    take = engine.moves.buffers.take

    def note(shape: tuple[int, ...], dtype: object) -> Tensor:
        (spare,) = engine.moves.buffers._spare
        taken = take(shape, dtype)  # type: ignore[arg-type]
        assert taken is spare
        given.append(tuple(taken.shape))
        return taken

    monkeypatch.setattr(engine.moves.buffers, "take", note)
    first = engine.moves.copy_state(sequence)
    geometry = sequence.slab.geometry
    assert given == [copy_shape(used_slots(first.committed, first.sink, geometry), geometry)]
    engine.moves.buffers.give_back(first.storage)
    assert engine.moves.copy_state(sequence).storage is first.storage


def test_a_slab_that_was_given_away_is_not_copied(make_engine: MakeEngine) -> None:
    """Whoever writes a snapshot may know a sequence that has just left: its slab has another owner then."""
    engine = make_engine(tiny.engine_config(capacity=2))
    sequence = engine.open("someone", [])
    say(engine, sequence, PROMPT, 4)
    lent = engine.moves.lend(sequence)
    with pytest.raises(SessionBusy, match="on its way out"):
        engine.moves.copy_state(sequence)
    engine.moves.stay(sequence)
    assert engine.moves.copy_state(sequence).committed == lent.committed
    away(engine, sequence)
    with pytest.raises(SessionBusy, match="on its way out"):
        engine.moves.copy_state(sequence)


@pytest.mark.parametrize(("length", "start"), [(30, 0), (31, 0), (41, 0), (42, 0), (50, 16), (58, 24)])
def test_a_rebuild_begins_at_the_beginning_or_behind_the_first_lap(length: int, start: int) -> None:
    geometry = SlabGeometry(4, 1, 2, CacheConfig(2, 8, 4), DType.FLOAT32)
    assert rebuild_start(length, 2, geometry, 8) == start

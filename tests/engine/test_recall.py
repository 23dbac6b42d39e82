"""Recall in the engine: pieces of the past in pinned slots, against the oracle and bit for bit."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from kakeya.engine import recall as recall_module, state as state_module
from kakeya.engine.engine import Engine
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.slab import recalled_positions
from kakeya.engine.stream import EventStream
from kakeya.models.checkpoint import open_checkpoint
from kakeya.sessions.state_files import read_state, write_state
from kakeya.types import (
    Numerics,
    SamplingParams,
    TokenEvent,
    TokenRange,
)
from support import tiny
from support.engines import GREEDY, FunctionProposer, RunsAhead, say, tokens_of
from support.recalling import (
    CACHE,
    PAGES,
    PINNED,
    RECALL,
    SPARE,
    Repinned,
    config_of,
    entries_of,
    history,
    open_with_recall,
    oracle_logits,
    ranges,
    slots,
)
from support.reference import Oracle

SEEN = SamplingParams(logprobs=True, top_logprobs=20)


@pytest.fixture(autouse=True)
def short_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of a few tokens recall before their last ones."""
    monkeypatch.setattr(recall_module, "TAIL", 4)


@pytest.fixture(params=["torch", "torch ahead", "native", "mlx", "device", "device exact", "device drafts"])
def engine(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Engine]:
    """An engine with slots for recall, on every path that computes attention."""
    numerics = Numerics.FAST if request.param in ("device", "device drafts") else Numerics.EXACT
    config = config_of(numerics=numerics, **tiny.COMPUTERS.get(request.param, tiny.COMPUTERS["torch"]))
    if request.param.startswith("device"):
        drafter = (
            tiny.random_drafter(open_checkpoint(tiny_llama).config) if "drafts" in request.param else None
        )
        backend = tiny.make_device_backend(tiny_llama, config, drafter=drafter)
    else:
        backend = tiny.make_backend(tiny.load(tiny_llama, config), config)
        backend = RunsAhead(backend) if request.param == "torch ahead" else backend
    engine = Engine(backend, config).start()
    yield engine
    engine.shutdown()


@pytest.fixture(params=["torch", "mlx"])
def exact(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Engine]:
    config = config_of(**tiny.COMPUTERS[request.param])
    engine = tiny.make_engine(tiny.load(tiny_llama, config), config)
    yield engine
    engine.shutdown()


def logprobs_of(stream: EventStream) -> list[dict[int, float]]:
    return [
        {each.token_id: each.logprob for each in event.top_logprobs}
        for event in stream
        if isinstance(event, TokenEvent)
    ]


def check_against(
    oracle: Oracle, sequence: TokenSequence, said: dict[int, list[dict[int, float]]], at: Repinned
) -> None:
    """`said`: by the length of the history before each answer, the candidates of its tokens."""
    slab = sequence.slab
    logits = oracle_logits(oracle, sequence.tokens, slab.pinned, slab.recall, slab.window, at)
    for length, answer in said.items():
        for row, seen in enumerate(answer, start=length - 1):
            expected = logits[row].log_softmax(-1)
            for token, logprob in seen.items():
                assert expected[token].item() == pytest.approx(logprob, abs=2e-4)


# What the slots hold.


@given(st.integers(0, 5), st.integers(1, 12), st.data())
def test_the_slots_hold_what_was_named_twice_and_the_earliest_others(
    pinned: int, recall: int, data: st.DataObject
) -> None:
    named = sorted(data.draw(st.sets(st.integers(pinned, pinned + 40), min_size=1, max_size=recall)))
    chosen = [TokenRange(position, position + 1) for position in named]
    copies = (named * 2)[max(0, 2 * len(named) - recall) :]
    others = [position for position in range(pinned, pinned + 100) if position not in named]
    expected = others[: recall - len(copies)] + copies
    assert recalled_positions(chosen, pinned, recall).tolist() == expected
    assert recalled_positions((), pinned, recall).tolist() == list(range(pinned, pinned + recall))


def test_the_oracle_without_recall_is_the_plain_one(oracle: Oracle) -> None:
    tokens = history(40)
    mine = oracle_logits(oracle, tokens, 2, 3, 6, {})
    assert (mine - oracle.logits(tokens, 5, 6)).abs().max() < 1e-4


def test_a_copy_sees_the_pinned_tokens_and_copies_before_it() -> None:
    entries, own = entries_of(range(10), 1, 2, 3, {8: [4, 5]})
    copies = [number for number in range(len(entries.tokens)) if number not in own]
    assert [entries.tokens[number] for number in copies] == [4, 5]
    assert entries.seen[copies[1]] == [(own[0], 2), (copies[0], 1), (copies[1], 0)]


# Against the oracle.


@pytest.mark.parametrize("pinned", [None, 0, 4])
def test_named_pages_are_seen_from_the_right_token_on(
    engine: Engine, oracle: Oracle, pinned: int | None
) -> None:
    sequence = open_with_recall(engine, pinned)
    kept = sequence.slab.pinned
    say(engine, sequence, history(60), 3)
    engine.append(sequence, history(9, seed=1))
    assert engine.recall(sequence, PAGES) == PAGES
    # Of the ten tokens that are not computed, the last four begin in the second block of four.
    at = 62 + 4
    said = {72: logprobs_of(engine.generate(sequence, 6, SEEN))}
    positions = recalled_positions(PAGES, kept, RECALL).tolist()
    check_against(oracle, sequence, said, {at: positions})


@pytest.mark.parametrize(
    ("named", "seen"),
    [
        (ranges((20, 22), (30, 32)), [30, 31, 20, 21, 30, 31]),
        (ranges((20, 22)), [2, 3, 20, 21, 20, 21]),
        (ranges((2, 3)), [3, 4, 5, 6, 2, 2]),
    ],
)
def test_fewer_tokens_than_slots_are_seen_twice(
    engine: Engine, oracle: Oracle, named: Sequence[TokenRange], seen: list[int]
) -> None:
    sequence = open_with_recall(engine)
    say(engine, sequence, history(60), 3)
    engine.append(sequence, history(3, seed=1))
    engine.recall(sequence, named)
    said = {66: logprobs_of(engine.generate(sequence, 6, SEEN))}
    check_against(oracle, sequence, said, {62: seen})


def test_what_lies_before_a_short_piece_keeps_its_slots(exact: Engine) -> None:
    sequence = open_with_recall(exact)
    say(exact, sequence, history(60), 3)
    beginning = slots(sequence)
    exact.append(sequence, [7])
    exact.recall(sequence, ranges((20, 21)))
    tokens_of(exact.generate(sequence, 1, GREEDY))
    assert sequence.slab.holds.tolist() == [2, 3, 4, 5, 20, 20]
    assert torch.equal(slots(sequence, 0, PINNED + 4), beginning[..., : PINNED + 4, :])


def test_turn_after_turn(engine: Engine, oracle: Oracle) -> None:
    sequence = open_with_recall(engine)
    say(engine, sequence, history(50), 2)
    at: dict[int, list[int]] = {}
    said: dict[int, list[dict[int, float]]] = {}
    for turn, chosen in enumerate(
        [ranges((10, 13)), ranges((10, 13), (20, 23)), ranges((3, 4)), ranges((2, 8))]
    ):
        engine.append(sequence, history(4, seed=turn))
        engine.recall(sequence, chosen)
        at[sequence.slab.written] = recalled_positions(chosen, PINNED, RECALL).tolist()
        length = len(sequence.tokens)
        said[length] = logprobs_of(engine.generate(sequence, 12, SEEN))
    check_against(oracle, sequence, said, at)


# Bit for bit.


def test_to_name_the_beginning_changes_nothing(exact: Engine) -> None:
    plain, named = open_with_recall(exact), open_with_recall(exact)
    for sequence in (plain, named):
        say(exact, sequence, history(60), 3)
        exact.append(sequence, history(5, seed=1))
    exact.recall(named, ranges((PINNED, PINNED + RECALL)))
    assert tokens_of(exact.generate(plain, 20, GREEDY)) == tokens_of(exact.generate(named, 20, GREEDY))
    assert torch.equal(plain.slab.storage, named.slab.storage)
    assert named.slab.recalled == ranges((PINNED, PINNED + RECALL))


def test_the_beginning_computed_again_has_the_same_bits(exact: Engine) -> None:
    sequence = open_with_recall(exact)
    say(exact, sequence, history(60), 3)
    beginning = slots(sequence)
    for chosen in (PAGES, ranges((PINNED, PINNED + RECALL))):
        exact.append(sequence, history(4))
        exact.recall(sequence, chosen)
        tokens_of(exact.generate(sequence, 2, GREEDY))
    assert torch.equal(slots(sequence), beginning)


def test_pinned_with_a_text_or_pinned_to_it_later(exact: Engine) -> None:
    text = history(60)
    page = text[30:36]
    pinned_so, repinned = open_with_recall(exact), open_with_recall(exact)
    say(exact, pinned_so, [*text[:PINNED], *page, *text], 1)
    say(exact, repinned, text, 1)
    exact.append(repinned, [7, 8, 9])
    exact.recall(repinned, ranges((30, 36)))
    tokens_of(exact.generate(repinned, 1, GREEDY))
    assert torch.equal(slots(pinned_so), slots(repinned))


def one_conversation(engine: Engine, cuts: Sequence[int] = (), *, alone: bool = True) -> list[int]:
    """Two turns with recall in each; `cuts`: where the second turn's tokens are cut into appends."""
    others = [] if alone else [open_with_recall(engine) for _ in range(2)]
    streams = []
    for other in others:
        engine.append(other, history(40, seed=5))
        streams.append(engine.generate(other, 40, GREEDY))
    sequence = open_with_recall(engine)
    said = say(engine, sequence, history(60), 3)
    new = history(11, seed=1)
    for start, end in zip((0, *cuts), (*cuts, len(new)), strict=True):
        engine.append(sequence, new[start:end])
    engine.recall(sequence, PAGES)
    said += tokens_of(engine.generate(sequence, 12, GREEDY))
    for stream in streams:
        tokens_of(stream)
    for each in (sequence, *others):
        engine.close(each)
    return said


def test_alone_among_others_and_cut_anywhere(exact: Engine) -> None:
    expected = one_conversation(exact)
    assert one_conversation(exact, alone=False) == expected
    assert one_conversation(exact, cuts=(1, 2, 7)) == expected


@pytest.mark.parametrize("exact", ["torch"], indirect=True)
def test_every_path_says_the_same(engine: Engine, exact: Engine) -> None:
    """Greedy, so that a device drafts by itself where it can."""
    assert one_conversation(engine) == one_conversation(exact)


def test_in_steps_of_any_size(tiny_llama: Path, exact: Engine) -> None:
    expected = one_conversation(exact)
    config = config_of(prefill_block=3, max_batch_tokens=5)
    other = tiny.make_engine(tiny.load(tiny_llama, config), config)
    try:
        assert one_conversation(other) == expected
    finally:
        other.shutdown()


def test_with_drafts(tiny_llama: Path, exact: Engine) -> None:
    expected = one_conversation(exact)
    right = FunctionProposer(lambda tokens: [tokens[-1], 5, 6])
    config = config_of()
    other = tiny.make_engine(tiny.load(tiny_llama, config), config, right)
    try:
        assert one_conversation(other) == expected
    finally:
        other.shutdown()


def test_a_fork_goes_on_with_what_was_recalled(exact: Engine) -> None:
    original = open_with_recall(exact)
    say(exact, original, history(60), 3)
    exact.append(original, [7, 8])
    exact.recall(original, PAGES)
    tokens_of(exact.generate(original, 2, GREEDY))
    exact.recall(original, ranges((4, 6)), remember=True)
    copy = exact.fork(original)
    assert copy.slab.recalled == PAGES
    assert copy.recall is not None
    assert copy.recall.remembered == ranges((4, 6))
    assert copy.slab.untouched == original.slab.untouched
    assert say(exact, copy, [9], 8) == say(exact, original, [9], 8)


def test_an_exported_session_goes_on_with_what_was_recalled(
    tiny_llama: Path, exact: Engine, tmp_path: Path
) -> None:
    original = open_with_recall(exact)
    say(exact, original, history(60), 3)
    exact.append(original, [7, 8])
    exact.recall(original, ranges((40, 42)), remember=True)
    exact.recall(original, ranges((20, 23)))
    tokens_of(exact.generate(original, 2, GREEDY))
    exact.append(original, [9])
    exact.recall(original, ranges((10, 12)))
    path = tmp_path / "state"
    write_state(path, exact.export_state(original))
    config = config_of(cache=replace(CACHE, spare=SPARE + 3))
    other = tiny.make_engine(tiny.load(tiny_llama, config), config)
    try:
        state = read_state(path, "tiny", other._backend.pool.geometry)
        copy = other.import_state(state, "someone")
        assert copy.slab.recalled == ranges((20, 23), (40, 42))
        assert tokens_of(other.generate(copy, 8, GREEDY)) == tokens_of(exact.generate(original, 8, GREEDY))
        assert copy.slab.recalled == original.slab.recalled == ranges((10, 12), (40, 42))
    finally:
        other.shutdown()


def test_a_file_of_version_2_was_filled_up_with_the_beginning(
    exact: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = open_with_recall(exact)
    say(exact, original, history(60), 3)
    exact.append(original, [7, 8])
    exact.recall(original, ranges((2, 5), (20, 23)))
    tokens_of(exact.generate(original, 2, GREEDY))
    written = exact.export_state(original)
    assert written.recall is not None
    path = tmp_path / "state"
    monkeypatch.setattr(state_module, "VERSION", "2")
    write_state(path, replace(written, recall=replace(written.recall, recalled=ranges((20, 23)))))
    copy = exact.import_state(read_state(path, "tiny", exact._backend.pool.geometry), "someone")
    assert copy.slab.recalled == ranges((2, 5), (20, 23))
    exact.append(copy, [9])
    exact.append(original, [9])
    assert tokens_of(exact.generate(copy, 8, GREEDY)) == tokens_of(exact.generate(original, 8, GREEDY))
    assert copy.inv4_violations == 0

"""Recall from turn to turn: what is searched for, refused, taken back, and who waits for whom."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from kakeya.engine import recall as recall_module
from kakeya.engine.batch import RecallSegment, Segment
from kakeya.engine.engine import Engine
from kakeya.engine.recall import Retriever, Turn
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.stream import EventStream
from kakeya.errors import InvalidArgument, InvariantViolation, SessionBusy, StateMismatch
from kakeya.observer import EngineObserver, SearchResult
from kakeya.sessions.state_files import read_state, write_state
from kakeya.types import RecallQuery, ShareBeginnings, StopReason, TokenRange
from support import tiny
from support.engines import GREEDY, Hooked, done_of, say, tokens_of
from support.recalling import (
    CACHE,
    PAGES,
    PINNED,
    RECALL,
    WINDOW,
    config_of,
    history,
    open_with_recall,
    ranges,
    slots,
)


@dataclass
class Chosen:
    """A retriever that is told what to choose; it remembers what it was asked."""

    answer: object = ()
    queries: list[RecallQuery] = field(default_factory=list)
    histories: list[list[int]] = field(default_factory=list)
    may_answer: threading.Event = field(default_factory=threading.Event)
    forks: int = 0

    def __post_init__(self) -> None:
        self.may_answer.set()

    def choose(self, history: Sequence[int], query: RecallQuery) -> Sequence[TokenRange]:
        assert self.may_answer.wait(20)
        assert threading.current_thread().name.startswith("kakeya-recall")
        self.queries.append(query)
        self.histories.append(list(history[: query.end]))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer  # type: ignore[return-value]

    nbytes = 0

    def fork(self) -> "Chosen":
        self.forks += 1
        return Chosen(self.answer)


class Counted(EngineObserver):
    def __init__(self) -> None:
        self.searched: list[float] = []
        self.results: list[SearchResult] = []
        self.slots: list[tuple[int, int]] = []
        self.violated: list[str] = []

    def recall_searched(self, seconds: float, result: SearchResult) -> None:
        self.searched.append(seconds)
        self.results.append(result)

    @property
    def failed(self) -> int:
        return self.results.count(SearchResult.FAILED)

    def recalled(self, ranges: int, slots: int, seconds: float) -> None:
        self.slots.append((ranges, slots))

    def invariant_violated(self, invariant: str) -> None:
        self.violated.append(invariant)


@pytest.fixture(autouse=True)
def short_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall_module, "TAIL", 4)


@pytest.fixture
def counted() -> Counted:
    return Counted()


Make = Callable[..., Engine]


@pytest.fixture(scope="module", params=["torch", "mlx"])
def decoder(tiny_llama: Path, request: pytest.FixtureRequest) -> tiny.Model:
    return tiny.load(tiny_llama, config_of(**tiny.COMPUTERS[request.param]))


@pytest.fixture
def make(decoder: tiny.Model, counted: Counted, request: pytest.FixtureRequest) -> Make:
    def make(
        before: Callable[[Sequence[Segment]], None] = lambda segments: None, **changes: object
    ) -> Engine:
        config = config_of(**changes)
        backend = Hooked(tiny.make_backend(decoder, config), before)
        engine = Engine(backend, config, observer=counted).start()
        request.addfinalizer(engine.shutdown)
        return engine

    return make


def talked(engine: Engine, retriever: Retriever | None = None, **rest: object) -> TokenSequence:
    """A session whose window has moved on, with a new message."""
    sequence = open_with_recall(engine, retriever=retriever, **rest)
    say(engine, sequence, history(60), 3)
    engine.append(sequence, [5, 6, 7])
    return sequence


# What is refused.


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (ranges((60, 70)), "range 60 to 70 is empty or outside the history of 66 tokens"),
        (ranges((-1, 3)), "outside the history"),
        (ranges((9, 9)), "range 9 to 9 is empty"),
        (ranges((10, 13), (12, 14)), "ranges 10 to 13 and 12 to 14 overlap"),
        (ranges((10, 17)), "the ranges are 7 tokens, recall_tokens is 6"),
        (
            ranges((1, 3)),
            "range 1 to 3 is in sight: the next turn sees the first 2 tokens and those from 55 on",
        ),
        (ranges((54, 56)), "range 54 to 56 is in sight"),
    ],
)
def test_bad_ranges_are_named_and_change_nothing(make: Make, named: object, message: str) -> None:
    engine = make()
    sequence = talked(engine)
    with pytest.raises(InvalidArgument, match=message):
        engine.recall(sequence, named)
    assert sequence.recall is not None
    assert sequence.recall.wanted is None
    assert done_of(engine.generate(sequence, 2, GREEDY)).recalled == ()


def test_the_last_token_out_of_sight_can_be_named(make: Make) -> None:
    engine = make()
    sequence = talked(engine)
    engine.recall(sequence, ranges((54, 55)))
    assert done_of(engine.generate(sequence, 2, GREEDY)).recalled == ranges((54, 55))


def test_a_session_without_recall_refuses_ranges(make: Make) -> None:
    engine = make()
    sequence = open_with_recall(engine, recall=0)
    say(engine, sequence, history(60), 1)
    with pytest.raises(InvalidArgument, match="no slots for recall"):
        engine.recall(sequence, PAGES)
    assert sequence.slab.window == WINDOW + RECALL


def test_nothing_can_be_named_while_all_is_seen(make: Make) -> None:
    engine = make()
    sequence = open_with_recall(engine)
    engine.append(sequence, history(12))
    with pytest.raises(InvalidArgument, match="it sees the whole history"):
        engine.recall(sequence, ranges((3, 4)))
    assert engine.recall(sequence, ()) == ()


def test_what_is_remembered_counts(make: Make) -> None:
    engine = make()
    sequence = talked(engine)
    assert engine.recall(sequence, ranges((10, 12), (12, 14)), remember=True) == ranges((10, 14))
    with pytest.raises(InvalidArgument, match="with what is remembered 7 tokens"):
        engine.recall(sequence, ranges((20, 23)))
    with pytest.raises(InvalidArgument, match="the ranges are 7 tokens"):
        engine.recall(sequence, ranges((20, 27)), remember=True)
    assert engine.recall(sequence, ranges((13, 16))) == ranges((10, 16))
    assert done_of(engine.generate(sequence, 1, GREEDY)).recalled == ranges((10, 16))


def test_what_was_named_counts_when_more_is_to_be_remembered(make: Make) -> None:
    engine = make()
    sequence = talked(engine)
    engine.recall(sequence, ranges((10, 16)))
    with pytest.raises(InvalidArgument, match="with what the next turn was told to see 12 tokens"):
        engine.recall(sequence, ranges((20, 26)), remember=True)
    assert sequence.recall is not None
    assert sequence.recall.remembered == ()
    assert engine.recall(sequence, ranges((12, 16)), remember=True) == ranges((10, 16))
    assert done_of(engine.generate(sequence, 1, GREEDY)).recalled == ranges((10, 16))


@pytest.mark.parametrize("wanted", [ranges((10, 13), (20, 24)), ranges((90, 93))])
def test_what_does_not_fit_leaves_the_old_set(make: Make, counted: Counted, wanted: object) -> None:
    """As a state directory of an earlier version may say."""
    engine = make()
    sequence = talked(engine)
    engine.recall(sequence, PAGES)
    tokens_of(engine.generate(sequence, 1, GREEDY))
    engine.append(sequence, [7])
    assert sequence.recall is not None
    sequence.recall.wanted = wanted
    assert done_of(engine.generate(sequence, 1, GREEDY)).recalled == PAGES
    assert counted.failed == 1
    assert say(engine, sequence, [7], 1)


@pytest.mark.parametrize("recall", [-1, RECALL + 1])
def test_more_slots_than_there_are(make: Make, recall: int) -> None:
    with pytest.raises(InvalidArgument, match=f"recall_tokens must be from 0 to {RECALL}, got {recall}"):
        open_with_recall(make(), recall=recall)


def test_no_slots_at_all(make: Make) -> None:
    engine = make(cache=replace(CACHE, recall=0))
    with pytest.raises(InvalidArgument, match="there are no slots for recall, got 6"):
        open_with_recall(engine)


def test_pinned_and_recalled_tokens_leave_a_window(make: Make) -> None:
    engine = make()
    most = CACHE.capacity - RECALL - 1
    open_with_recall(engine, most)
    with pytest.raises(InvalidArgument, match=f"from 0 to {most} tokens"):
        open_with_recall(engine, most + 1)


# What is searched for.


def test_a_turn_sees_what_the_retriever_chose(make: Make, counted: Counted) -> None:
    engine, retriever = make(), Chosen(PAGES)
    sequence = talked(engine, retriever)
    retriever.queries.clear()
    counted.searched.clear()
    done = done_of(engine.generate(sequence, 3, GREEDY))
    assert done.recalled == PAGES
    assert done.recalled_tokens == 6
    assert done.recall_duration_seconds > 0
    query = RecallQuery(62, PINNED, WINDOW, RECALL, query_from=63, end=66)
    assert retriever.queries == [query]
    assert retriever.histories[-1] == sequence.tokens[:66].tolist()
    assert len(counted.searched) == 1
    assert counted.slots == [(2, 6)]


def test_the_first_prompt_can_recall_its_own_beginning(make: Make) -> None:
    engine, retriever = make(), Chosen(PAGES)
    sequence = open_with_recall(engine, retriever=retriever)
    engine.append(sequence, history(60))
    assert done_of(engine.generate(sequence, 3, GREEDY)).recalled == PAGES
    assert [query.length for query in retriever.queries] == [56]


def test_no_search_where_all_is_seen_or_nothing_was_said(make: Make) -> None:
    engine, retriever = make(), Chosen(())
    sequence = open_with_recall(engine, retriever=retriever)
    say(engine, sequence, history(15), 30)
    assert not retriever.queries
    tokens_of(engine.generate(sequence, 3, GREEDY))  # the answer goes on
    assert not retriever.queries
    say(engine, sequence, [7], 3)
    assert len(retriever.queries) == 1


def test_an_empty_choice_keeps_what_is_there(make: Make, counted: Counted) -> None:
    engine, retriever = make(), Chosen(PAGES)
    sequence = talked(engine, retriever)
    tokens_of(engine.generate(sequence, 3, GREEDY))
    retriever.answer = ()
    engine.append(sequence, [7])
    assert done_of(engine.generate(sequence, 3, GREEDY)).recalled == PAGES
    assert len(counted.slots) == 1
    assert counted.results[-2:] == [SearchResult.FOUND, SearchResult.NOTHING]


def test_only_changed_slots_are_computed(make: Make, counted: Counted) -> None:
    engine, retriever = make(), Chosen(PAGES)
    sequence = talked(engine, retriever)
    for chosen in (PAGES, PAGES, ranges((20, 23), (35, 38)), ranges((20, 23))):
        retriever.answer = chosen
        engine.append(sequence, [7])
        tokens_of(engine.generate(sequence, 1, GREEDY))
    # Three tokens alone come twice: they lie where they were, and once more behind themselves.
    assert counted.slots == [(2, 6), (2, 3), (1, 3)]


@pytest.mark.parametrize(
    "answer",
    [
        RuntimeError("the index is broken"),
        ranges((10, 20)),  # longer than the slots
        ranges((0, 2)),  # pinned
        ranges((60, 64)),  # in the window
        ranges((10, 12), (11, 13)),
        "nonsense",
    ],
)
def test_a_search_that_fails_leaves_the_old_set(make: Make, counted: Counted, answer: object) -> None:
    engine, retriever = make(), Chosen(PAGES)
    sequence = talked(engine, retriever)
    tokens_of(engine.generate(sequence, 3, GREEDY))
    retriever.answer = answer
    engine.append(sequence, [7])
    done = done_of(engine.generate(sequence, 3, GREEDY))
    assert done.stop_reason is StopReason.MAX_TOKENS
    assert done.recalled == PAGES
    assert counted.failed == 1


def test_what_the_client_names_is_not_searched_for(make: Make) -> None:
    engine, retriever = make(), Chosen(PAGES)
    sequence = talked(engine, retriever)
    retriever.queries.clear()
    engine.recall(sequence, ranges((12, 14)))
    assert done_of(engine.generate(sequence, 3, GREEDY)).recalled == ranges((12, 14))
    assert not retriever.queries
    engine.append(sequence, [7])
    assert done_of(engine.generate(sequence, 3, GREEDY)).recalled == PAGES


def test_what_is_remembered_is_asked_for_once_it_is_out_of_sight(make: Make) -> None:
    engine, retriever = make(), Chosen(())
    sequence = talked(engine, retriever)
    engine.recall(sequence, ranges((0, 3), (53, 55)), remember=True)
    tokens_of(engine.generate(sequence, 1, GREEDY))
    assert retriever.queries[-1].remembered == ranges((2, 3), (53, 55))
    engine.recall(sequence, ranges((0, 3), (53, 55), (63, 64)), remember=True)
    engine.append(sequence, [7])
    tokens_of(engine.generate(sequence, 30, GREEDY))
    assert retriever.queries[-1].remembered == ranges((2, 3), (53, 55))
    engine.append(sequence, [7])
    tokens_of(engine.generate(sequence, 1, GREEDY))
    assert retriever.queries[-1].remembered == ranges((2, 3), (53, 55), (63, 64))


def test_what_is_remembered_can_be_forgotten(make: Make) -> None:
    engine = make()
    sequence = talked(engine)
    engine.recall(sequence, ranges((20, 23)), remember=True)
    assert engine.recall(sequence, (), remember=True) == ()
    assert done_of(engine.generate(sequence, 1, GREEDY)).recalled == ()


def test_what_is_remembered_comes_back_without_a_retriever(make: Make) -> None:
    engine = make()
    sequence = talked(engine)
    engine.recall(sequence, ranges((20, 23)), remember=True)
    assert done_of(engine.generate(sequence, 1, GREEDY)).recalled == ranges((20, 23))


def test_a_fork_has_a_retriever_of_its_own(make: Make) -> None:
    engine, retriever = make(), Chosen(PAGES)
    sequence = talked(engine, retriever)
    copy = engine.fork(sequence)
    retriever.answer = ()
    assert done_of(engine.generate(copy, 3, GREEDY)).recalled == PAGES
    assert done_of(engine.generate(sequence, 3, GREEDY)).recalled == PAGES
    assert retriever.forks == 1


def test_others_stream_while_a_search_takes_its_time(make: Make) -> None:
    engine, retriever = make(), Chosen(PAGES)
    sequence = talked(engine, retriever)
    other = open_with_recall(engine)
    retriever.may_answer.clear()
    waiting = engine.generate(sequence, 3, GREEDY)
    assert len(say(engine, other, [5], 40)) == 40
    retriever.may_answer.set()
    assert done_of(waiting).recalled == PAGES


@pytest.mark.parametrize("seen", [PAGES, ()])
def test_the_past_is_computed_again_while_a_turn_is_searched_for(make: Make, seen: object) -> None:
    """Up to where the turn sees what it will find, be it the same place."""
    engine, retriever = make(), Chosen(PAGES)
    sequence = talked(engine, retriever)
    assert sequence.recall is not None
    sequence.recall.past = (Turn(sequence.slab.written, seen),)
    retriever.may_answer.clear()
    waiting = engine.generate(sequence, 3, GREEDY)
    assert len(say(engine, open_with_recall(engine), [5], 40)) == 40
    assert sequence.recall.past == ()
    retriever.may_answer.set()
    assert done_of(waiting).recalled == PAGES


def test_a_cancel_while_searching(make: Make) -> None:
    engine, retriever = make(), Chosen(PAGES)
    sequence = talked(engine, retriever)
    retriever.may_answer.clear()
    stream = engine.generate(sequence, 3, GREEDY)
    stream.cancel()
    done = done_of(stream)
    assert (done.stop_reason, done.recalled) == (StopReason.CANCELLED, ())
    retriever.may_answer.set()
    assert done_of(engine.generate(sequence, 3, GREEDY)).recalled == PAGES


# What is taken back.


def test_a_cancel_before_the_first_token_puts_the_slots_back(make: Make) -> None:
    engine = make()
    sequence = talked(engine)
    engine.recall(sequence, PAGES)
    before = slots(sequence)
    stream = engine.generate(sequence, 3, GREEDY)
    while not stream.unread:
        pass
    assert engine.read(sequence, lambda each: each.slab.recalled) == PAGES
    stream.cancel()
    engine.rest(sequence)
    assert done_of(stream).recalled == ()
    assert sequence.slab.recalled == ()
    assert torch.equal(slots(sequence), before)
    # What was named is still wanted.
    assert done_of(engine.generate(sequence, 3, GREEDY)).recalled == PAGES


def test_a_cancel_after_the_first_token_keeps_what_was_recalled(make: Make) -> None:
    engine = make()
    sequence = talked(engine)
    engine.recall(sequence, PAGES)
    stream = engine.generate(sequence, 30, GREEDY)
    stream.next_event()
    stream.next_event()
    stream.cancel()
    assert done_of(stream).recalled == PAGES
    assert engine.read(sequence, lambda each: each.slab.recalled) == PAGES


def test_a_copy_is_made_of_what_cannot_be_taken_back(make: Make) -> None:
    """A long answer is copied before it ends, but not what may yet be as it was."""
    engine = make()
    sequence = talked(engine)
    engine.recall(sequence, PAGES)
    stream = engine.generate(sequence, 30, GREEDY)
    while not stream.unread:
        pass
    with pytest.raises(SessionBusy, match="half written"):
        engine.moves.copy_state(sequence)
    stream.next_event()
    stream.next_event()
    copy = engine.moves.copy_state(sequence)
    assert sequence.request is not None
    assert copy.recall is not None
    assert (copy.recall.recalled, copy.committed >= 66) == (PAGES, True)
    stream.cancel()


def test_a_cancel_in_the_middle_puts_the_slots_back(make: Make) -> None:
    """One slot a step, and the client leaves after the third."""
    streams: list[EventStream] = []
    started, computed = threading.Event(), []

    def leave(segments: Sequence[Segment]) -> None:
        computed.extend(s.start for s in segments if isinstance(s, RecallSegment))
        if len(computed) == 3:
            assert started.wait(20)
            streams[0].cancel()

    engine = make(leave, prefill_block=1, max_batch_tokens=2)
    sequence = talked(engine)
    engine.recall(sequence, PAGES)
    before = slots(sequence)
    streams.append(engine.generate(sequence, 3, GREEDY))
    started.set()
    assert done_of(streams[0]).stop_reason is StopReason.CANCELLED
    engine.rest(sequence)
    assert computed == [2, 3, 4]
    assert torch.equal(slots(sequence), before)
    assert sequence.slab.recalled == ()


def test_a_step_that_fails_puts_the_slots_back(make: Make) -> None:
    broken = threading.Event()

    def fail(segments: Sequence[Segment]) -> None:
        if broken.is_set() and any(s.start == 4 for s in segments if isinstance(s, RecallSegment)):
            raise RuntimeError("no luck")

    engine = make(fail, prefill_block=2)
    sequence = talked(engine)
    engine.recall(sequence, PAGES)
    before = slots(sequence)
    broken.set()
    with pytest.raises(Exception, match="no luck"):
        tokens_of(engine.generate(sequence, 3, GREEDY))
    engine.rest(sequence)
    assert torch.equal(slots(sequence), before)
    broken.clear()
    assert done_of(engine.generate(sequence, 3, GREEDY)).recalled == PAGES


def test_a_step_that_failed_for_another_is_computed_again(make: Make) -> None:
    broken = threading.Event()

    def fail(segments: Sequence[Segment]) -> None:
        if broken.is_set() and len(segments) > 1:
            raise RuntimeError("together we are too many")

    engine = make(fail)
    alone, beside = talked(engine), talked(engine)
    for sequence in (alone, beside):
        engine.recall(sequence, PAGES)
    expected = tokens_of(engine.generate(alone, 5, GREEDY))
    other = open_with_recall(engine)
    engine.append(other, [5])
    broken.set()
    stream = engine.generate(other, 60, GREEDY)
    assert tokens_of(engine.generate(beside, 5, GREEDY)) == expected
    assert len(tokens_of(stream)) == 60


def test_a_broken_count_of_slots_fails_the_session(make: Make, counted: Counted) -> None:
    def break_it(segments: Sequence[Segment]) -> None:
        for segment in segments:
            if isinstance(segment, RecallSegment):
                segment.recall._next += 1

    engine = make(break_it)
    sequence = talked(engine)
    engine.recall(sequence, PAGES)
    with pytest.raises(InvariantViolation, match="INV-4"):
        tokens_of(engine.generate(sequence, 3, GREEDY))
    assert counted.violated == ["INV-4"]
    assert sequence.inv4_violations == 1


def test_slots_that_hold_something_else_fail_the_session_alone(make: Make, counted: Counted) -> None:
    engine = make()
    sequence, other = talked(engine), talked(engine)
    engine.recall(sequence, PAGES)
    tokens_of(engine.generate(sequence, 1, GREEDY))
    assert sequence.slab.holds.tolist() == [20, 21, 22, 30, 31, 32]
    sequence.slab.recalled = ranges((10, 13))
    with pytest.raises(InvariantViolation, match="INV-4"):
        engine.append(sequence, [7])
    assert counted.violated == ["INV-4"]
    assert sequence.inv4_violations == 1
    assert say(engine, other, [7], 1)


# Places for what is overwritten.


def test_more_sessions_recall_than_there_are_places(make: Make) -> None:
    engine = make(capacity=8)
    sequences = [talked(engine) for _ in range(8)]
    for sequence in sequences:
        engine.recall(sequence, PAGES)
    streams = [engine.generate(sequence, 4, GREEDY) for sequence in sequences]
    answers = [tokens_of(stream) for stream in reversed(streams)]
    assert all(answer == answers[0] for answer in answers)
    assert all(sequence.slab.recalled == PAGES for sequence in sequences)
    engine.read(sequences[0], lambda each: None)
    assert len(engine._recalls._places._free) == 4


def test_more_recalls_begin_in_one_step_than_there_are_places(make: Make) -> None:
    """While a step takes its time, the searches of seven sessions end, so all may go on in the next one."""
    goes_on = threading.Event()
    goes_on.set()
    engine = make(lambda segments: goes_on.wait(20), capacity=8, max_batch_tokens=64, max_stall_ms=0)
    searched = Chosen()
    sequences = [talked(engine, searched) for _ in range(7)]
    before, searched.answer, searched.may_answer = len(searched.queries), PAGES, threading.Event()
    streams = [engine.generate(sequence, 4, GREEDY) for sequence in sequences]
    other = engine.open("someone", [])
    engine.append(other, [3, 4])
    goes_on.clear()
    streams.append(engine.generate(other, 1, GREEDY))
    searched.may_answer.set()
    while len(searched.queries) < before + 7:
        pass
    goes_on.set()
    answers = [tokens_of(stream) for stream in streams]
    assert all(answer == answers[0] for answer in answers[:7])
    assert all(sequence.slab.recalled == PAGES for sequence in sequences)


def test_a_reader_that_takes_nothing_holds_nobody_up(make: Make) -> None:
    """Their answers have begun, so they give their places away: a cancel then leaves what was recalled."""
    engine = make(capacity=6)
    sequences = [talked(engine) for _ in range(5)]
    for sequence in sequences:
        engine.recall(sequence, PAGES)
    idle = [engine.generate(sequence, 4, GREEDY) for sequence in sequences[:4]]
    while not all(stream.unread for stream in idle):
        pass
    assert done_of(engine.generate(sequences[4], 4, GREEDY)).recalled == PAGES
    for stream in idle:
        stream.cancel()
    for sequence in sequences[:4]:
        engine.rest(sequence)
    kept = [bool(sequence.slab.recalled) for sequence in sequences[:4]]
    assert sorted(kept) == [False, False, False, True]


# Beside sharing, and in files.


def test_a_prefix_that_was_overwritten_is_not_shared(make: Make) -> None:
    changes = {"cache": replace(CACHE, recall=40, window=40), "capacity": 2}
    engine = make(share_beginnings=ShareBeginnings.OWNER, **changes)
    text = history(120)
    sequence = open_with_recall(engine, recall=40)
    say(engine, sequence, text, 1)
    engine.append(sequence, [7, 8])
    engine.recall(sequence, ranges((2, 22), (50, 70)))
    tokens_of(engine.generate(sequence, 1, GREEDY))
    # Twenty tokens of the prefix are where they were; one granule of sixteen lies within.
    other = open_with_recall(engine, recall=40)
    engine.append(other, text[:60])
    assert done_of(engine.generate(other, 1, GREEDY)).cached_token_count == 22
    fresh = make(share_beginnings=ShareBeginnings.OFF, **changes)
    alone = open_with_recall(fresh, recall=40)
    say(fresh, alone, text[:60], 1)
    assert torch.equal(other.slab.storage[..., :59, :], alone.slab.storage[..., :59, :])


@pytest.mark.parametrize(
    "changes",
    [
        {"slots": "many"},
        {"slots": 99},
        {"turn_from": 1000},
        {"recalled": [{"start": 5, "end": 2}]},
        {"recalled": [{"start": 10, "end": 20}]},
        {"remembered": None},
        {"recalled": [{"start": 1, "end": 4}]},
        {"past": 7},
        {"past": [[30, [{"start": 10, "end": 13}]]]},  # computed already
        {"past": [[65, []], [64, []]]},
        {"past": [[66, []]]},
        {"past": [[65, [{"start": 10, "end": 17}]]]},
        {"past": [[65, [{"start": 0, "end": 3}]]]},
        {"past": [[64, [{"start": 62, "end": 65}]]]},
        {"seconds": None},
        {"wanted": [{"start": 0, "end": 4}]},
        {"wanted": [{"start": 10, "end": 14}], "remembered": [{"start": 20, "end": 23}]},
    ],
)
def test_a_damaged_list_in_a_file(make: Make, tmp_path: Path, changes: dict[str, object]) -> None:
    engine = make()
    state = engine.export_state(talked(engine))

    class Damaged:
        def to_json(self) -> str:
            sound = {"slots": 6, "recalled": [], "remembered": [], "wanted": None, "turn_from": 0}
            return json.dumps(sound | changes)

    path = tmp_path / "state"
    write_state(path, replace(state, recall=Damaged()))
    with pytest.raises(StateMismatch, match="damaged session state"):
        read_state(path, "tiny", engine._backend.pool.geometry)

"""The proposing side: what it is told, what it guesses and sends, and whom it has room for."""

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kakeya.engine.proposer import DraftRequest, Proposer
from kakeya.errors import InvalidArgument, KakeyaError, Unavailable
from kakeya.metrics import ProposerMetrics
from kakeya.proposers.blocks import BlockMaker, Customer
from kakeya.proposers.ngram import LookUp
from kakeya.types import Numerics
from kakeya.wire import distributed_pb2 as pb
from support import tiny
from support.engines import FunctionProposer, NothingKept
from support.proposing import Looker, desk, small_model, until

CONFIG = tiny.engine_config(window=30, spare=8, numerics=Numerics.EXACT, threads=1)
SAID = queue.Queue[object]


class Counting(FunctionProposer):
    """Guesses the numbers that follow the last token, and keeps what happens to its states."""

    name = "counting"

    def __init__(self, is_free: bool = True) -> None:
        super().__init__(lambda tokens: [(tokens[-1] + step) % tiny.VOCAB for step in range(1, 4)])
        self.is_free = is_free
        self.asked: list[list[int]] = []
        self.rolled: list[int] = []
        self.states = 0

    def new_state(self) -> NothingKept:
        proposer, state = self, NothingKept()
        self.states += 1
        state.rollback = proposer.rolled.append  # type: ignore[method-assign]
        state.close = proposer._closed  # type: ignore[method-assign]
        return state

    def _closed(self) -> None:
        self.states -= 1

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[int]]:
        self.asked += [list(request.tokens) for request in requests]
        return super().propose(requests)


@contextmanager
def making(*proposers: Proposer, **changes: object) -> Iterator[BlockMaker]:
    maker = BlockMaker(desk(*proposers, **changes)).start()
    try:
        yield maker
    finally:
        maker.close()


class Verifier:
    """A stream, and what came over it."""

    def __init__(self, maker: BlockMaker) -> None:
        self.said: SAID = queue.Queue()
        self.customer: Customer = maker.join(self.said.put, self.said.put)
        self.epoch = 0

    def say(self, session_id: int, **change: object) -> None:
        self.customer.apply(pb.ProposeRequest(session_id=session_id, **change))  # type: ignore[arg-type]

    def commit(self, session_id: int, start: int, tokens: Sequence[int], wanted: int, **more: object) -> None:
        self.epoch += 1
        commit = pb.Commit(epoch=self.epoch, start=start, token_ids=tokens, wanted=wanted, **more)  # type: ignore[arg-type]
        self.say(session_id, commit=commit)

    def open(self, session_id: int, tokens: Sequence[int], wanted: int) -> None:
        self.say(session_id, open=pb.Open())
        self.commit(session_id, 0, tokens, wanted)

    def next(self) -> pb.ProposeResponse:
        said = self.said.get(timeout=10)
        assert isinstance(said, pb.ProposeResponse), said
        return said

    def guessed(self, count: int) -> list[int]:
        """So many tokens, in as many blocks as they come in; each follows the last."""
        tokens: list[int] = []
        first = None
        while len(tokens) < count:
            block = self.next().block
            first = block.position if first is None else first
            assert block.position == first + len(tokens)
            tokens += block.token_ids
        assert len(tokens) == count
        return tokens

    def quiet(self) -> None:
        self.customer.caught_up().result(10)
        self.customer.caught_up().result(10)
        assert self.said.empty(), self.said.get()

    def failure(self) -> object:
        return self.said.get(timeout=10)


def test_it_guesses_as_far_as_is_wanted_and_no_further() -> None:
    with making(Counting()) as maker:
        verifier = Verifier(maker)
        verifier.open(1, [3, 4], 7)
        assert verifier.guessed(7) == [5, 6, 7, 8, 9, 10, 11]
        verifier.quiet()
        verifier.commit(1, 2, [5, 6], 7)
        assert verifier.guessed(2) == [12, 13], "what was right is history, and the rest is still right"
        verifier.quiet()
        assert maker.load().sessions == 1
        assert maker.load().busy_sessions == 0


def test_a_wrong_guess_is_forgotten_with_all_that_followed() -> None:
    proposer, metrics = Counting(), ProposerMetrics()
    maker = BlockMaker(desk(proposer), metrics).start()
    verifier = Verifier(maker)
    verifier.open(1, [3, 4], 4)
    verifier.guessed(4)
    verifier.commit(1, 2, [5, 20], 2)
    block = verifier.next().block
    assert (block.position, block.epoch, list(block.token_ids)) == (4, 2, [21, 22])
    assert proposer.rolled == [3]
    assert [3, 4, 5, 20] in proposer.asked
    maker.close()
    sample = metrics.registry.get_sample_value
    assert sample("kakeya_proposer_discarded_tokens_total") == 3
    assert sample("kakeya_proposer_guessed_tokens_total", {"proposer": "counting"}) == 6
    assert sample("kakeya_proposer_told_tokens_total") == 4
    assert sample("kakeya_proposer_sessions") == 1


def test_sessions_are_forked_rolled_back_and_dropped() -> None:
    proposer = Counting()
    with making(proposer) as maker:
        verifier = Verifier(maker)
        verifier.open(1, [3, 4, 5], 2)
        verifier.guessed(2)
        verifier.say(2, fork=pb.Fork(from_session_id=1))
        verifier.commit(2, 3, [], 1)
        said = verifier.next()
        assert (said.session_id, list(said.block.token_ids)) == (2, [6])
        verifier.say(1, rollback=pb.Rollback(epoch=9, length=2))
        verifier.quiet()
        verifier.commit(1, 2, [30], 1)
        assert list(verifier.next().block.token_ids) == [31]
        verifier.commit(1, 1, [40], 1)
        assert list(verifier.next().block.token_ids) == [41], "a commit may begin before the end"
        verifier.say(1, drop=pb.Drop())
        verifier.say(1, drop=pb.Drop())
        verifier.customer.caught_up().result(10)
        assert maker.load().sessions == 1
        verifier.customer.leave()
        until(lambda: maker.load().sessions == 0)
        assert proposer.states <= 0


@pytest.mark.parametrize(
    "wrong, words",
    [
        ({"session_id": 1, "open": pb.Open()}, "a session 1 already"),
        ({"session_id": 5, "rollback": pb.Rollback()}, "no session 5"),
        ({"session_id": 5, "fork": pb.Fork(from_session_id=6)}, "no session 6"),
        ({"session_id": 1, "commit": pb.Commit(start=9)}, "starts at 9, its history has 1"),
        ({"session_id": 1, "observe": pb.Observe(layer=3)}, "layer 3 was not asked for"),
        ({"session_id": 1}, "says nothing that is known"),
        ({"session_id": 1, "commit": pb.Commit(start=1, turn=pb.Turn(top_p=2.0))}, "top_p"),
    ],
)
def test_a_stream_that_makes_no_sense_is_ended(wrong: dict[str, object], words: str) -> None:
    with making(Counting()) as maker:
        verifier, other = Verifier(maker), Verifier(maker)
        other.open(1, [3], 0)
        verifier.open(1, [3], 0)
        verifier.customer.apply(pb.ProposeRequest(**wrong))  # type: ignore[arg-type]
        failure = verifier.failure()
        assert isinstance(failure, InvalidArgument)
        assert words in str(failure)
        other.commit(1, 1, [4], 1)
        assert other.guessed(1) == [5], "others go on"


def test_hidden_states_that_make_no_sense_end_the_stream() -> None:
    with making(Looker()) as maker:
        verifier = Verifier(maker)
        verifier.open(1, [3], 0)
        verifier.say(1, observe=pb.Observe(layer=0, rows=3, values=b"12"))
        assert "1 values are not 3 rows" in str(verifier.failure())


def test_an_id_beyond_the_vocabulary_refuses_its_session_alone() -> None:
    with making(Counting()) as maker:
        verifier = Verifier(maker)
        verifier.open(1, [tiny.VOCAB], 3)
        assert "an id is beyond it" in verifier.next().refused.reason
        verifier.open(2, [7], 1)
        assert verifier.guessed(1) == [8]


def test_who_has_no_guess_leaves_it_to_the_next_and_nobody_asks_in_vain() -> None:
    free, second = Counting(), FunctionProposer(lambda tokens: [])
    free.guess = lambda tokens: []
    second.is_free = True
    with making(free, second) as maker:
        verifier = Verifier(maker)
        verifier.open(1, [3], 4)
        verifier.quiet()
        asked = len(free.asked)
        verifier.quiet()
        assert len(free.asked) == asked == 1
        verifier.commit(1, 1, [4], 4)
        verifier.quiet()
        assert len(free.asked) == 2
    with making(LookUp(4), Counting()) as maker:
        verifier = Verifier(maker)
        verifier.open(1, [3, 4], 1)
        assert verifier.guessed(1) == [5]


def test_a_proposer_that_raises_refuses_its_sessions() -> None:
    def raising(tokens: Sequence[int]) -> list[int]:
        raise ValueError("a bug")

    with making(FunctionProposer(raising)) as maker:
        verifier = Verifier(maker)
        verifier.open(1, [3], 4)
        assert verifier.next().refused.reason == "the proposer function failed"
        verifier.quiet()


def test_a_state_that_raises_ends_its_stream_alone() -> None:
    def raising(length: int) -> None:
        raise ValueError("a bug")

    proposer = Counting()
    proposer.rolled = type("Raising", (list,), {"append": lambda self, length: raising(length)})()
    with making(proposer) as maker:
        verifier, other = Verifier(maker), Verifier(maker)
        verifier.open(1, [3], 1)
        assert verifier.guessed(1) == [4]
        verifier.commit(1, 1, [9], 1)
        assert isinstance(verifier.failure(), ValueError)
        other.open(1, [7], 1)
        assert other.guessed(1) == [8]


def test_states_of_the_idle_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    proposer = Counting()
    with making(proposer, capacity=1) as maker:
        verifier = Verifier(maker)
        verifier.open(1, [3], 1)
        assert verifier.guessed(1) == [4]
        verifier.open(2, [7], 1)
        verifier.quiet()
        assert proposer.states == 1, "nobody who is in use gives way"
        monkeypatch.setattr("kakeya.proposers.blocks._IDLE_SECONDS", 0.0)
        verifier.commit(2, 1, [8], 1)
        assert verifier.guessed(1) == [9]
        verifier.say(3, fork=pb.Fork(from_session_id=2))
        verifier.commit(3, 2, [], 1)
        assert verifier.guessed(1) == [9], "a fork for which there was no room is made anew"
        verifier.commit(1, 1, [4, 5], 1)
        assert verifier.guessed(1) == [6], "and so is the first"
        assert proposer.states == 1


def test_a_small_model_guesses_ahead_of_itself_what_it_says_in_one_go(tmp_path: Path) -> None:
    directory, prompt = tiny.write_llama(tmp_path), [5, 9, 22, 13, 7] * 9
    alone = small_model(directory, CONFIG, max_draft=40)
    state, whole = alone.new_state(), []
    while not whole:
        (whole,) = alone.propose([DraftRequest(state, prompt, 12)])
    with making(small_model(directory, CONFIG)) as maker:
        verifier = Verifier(maker)
        verifier.open(1, prompt, 12)
        assert verifier.guessed(12) == list(whole)
        wrong = (whole[1] + 1) % tiny.VOCAB
        verifier.commit(1, len(prompt), [whole[0], wrong], 12)
        other = small_model(directory, CONFIG, max_draft=40)
        state, anew = other.new_state(), []
        while not anew:
            (anew,) = other.propose([DraftRequest(state, [*prompt, whole[0], wrong], 12)])
        assert verifier.guessed(12) == list(anew)
        assert maker.load().seconds_per_token > 0


def test_it_says_when_it_dies(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    maker = BlockMaker(desk(Counting()))
    maker.check_alive()

    def broken() -> bool:
        raise MemoryError

    monkeypatch.setattr(maker, "_make_blocks", broken)
    maker._customers.append(verifier := Verifier(maker).customer)
    failed: list[Exception] = []
    verifier.fail = failed.append
    maker.start()
    assert maker.ended.result(10) is not None
    with pytest.raises(Unavailable):
        maker.check_alive()
    assert isinstance(failed[0], KakeyaError)
    assert maker.drain(1.0)
    maker.close()

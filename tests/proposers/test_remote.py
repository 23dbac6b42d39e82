"""A proposer elsewhere: slow, gone, lying or garbled, it neither changes nor holds up an answer."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from kakeya.engine.draft_length import DraftLength
from kakeya.engine.engine import Engine
from kakeya.engine.proposer import DraftRequest, WorksAhead
from kakeya.proposers.ngram import LookUp
from kakeya.proposers.remote import RemoteProposer, RemoteState
from kakeya.serving.config import ServerConfig
from kakeya.types import Numerics, SamplingParams
from kakeya.wire import distributed_pb2 as pb
from support import tiny
from support.engines import GREEDY, Hooked, say
from support.proposing import Answer, Impostor, Looker, block, desk, proposing, remote, small_model, until
from support.serving import free_port

PROMPT = [5, 9, 22, 13, 7, 5, 9, 22, 13, 40, 5, 9, 22]
CONFIG = tiny.engine_config(window=30, spare=8, numerics=Numerics.EXACT, threads=1)
STEP_SECONDS = 0.004  # about what a block takes on its way here


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("verifier"))


@contextmanager
def engine_with(
    directory: Path, *proposers: object, step: float = STEP_SECONDS, pays: bool = False
) -> Iterator[Engine]:
    backend = tiny.make_backend(tiny.load(directory, CONFIG), CONFIG)
    slow = Hooked(backend, lambda segments: time.sleep(step))
    engine = Engine(slow, CONFIG, proposers, length=DraftLength() if pays else None).start()
    try:
        yield engine
    finally:
        engine.shutdown()


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[int]:
    """What plain decoding says."""
    with engine_with(directory, step=0.0) as engine:
        return say(engine, engine.open("someone", []), PROMPT, 40)


@pytest.fixture(scope="module")
def twin(directory: Path) -> Iterator[str]:
    """The address of the verifier's own model, which guesses right."""
    with proposing(desk(small_model(directory, CONFIG))) as address:
        yield address


def generate(
    engine: Engine, count: int = 40, sampling: SamplingParams = GREEDY
) -> tuple[list[int], int, int]:
    """The tokens, and how many were accepted and proposed."""
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    events = list(engine.generate(sequence, count, sampling))
    engine.close(sequence)
    done = events[-1]
    return [event.token_id for event in events[:-1]], done.accepted_draft_tokens, done.proposed_draft_tokens


def drafted(engine: Engine, sampling: SamplingParams = GREEDY) -> tuple[list[int], int, int]:
    """The same of the first generate that drafts: on a busy machine guesses may all come too late."""
    deadline = time.monotonic() + 20
    while True:
        tokens, accepted, proposed = generate(engine, 40, sampling)
        if proposed or time.monotonic() > deadline:
            return tokens, accepted, proposed


# Right.


@pytest.mark.parametrize("ahead", [16, 0], ids=["ahead", "when needed"])
@pytest.mark.parametrize("pays", [True, False])
def test_what_it_guesses_is_kept(
    directory: Path, twin: str, expected: list[int], ahead: int, pays: bool
) -> None:
    with remote(twin, ahead=ahead) as proposer, engine_with(directory, proposer, pays=pays) as engine:
        tokens, accepted, proposed = drafted(engine)
        assert tokens == expected
        assert accepted == proposed > 0


def test_it_draws_with_the_verifiers_random_numbers(directory: Path, twin: str) -> None:
    sampling = SamplingParams(temperature=1.0, seed=11, top_p=0.9, frequency_penalty=0.3, logit_bias={4: 2.0})
    with remote(twin) as proposer, engine_with(directory, proposer) as engine:
        _, accepted, proposed = drafted(engine, sampling)
    assert accepted == proposed > 0


def test_it_stands_beside_others(directory: Path, twin: str, expected: list[int]) -> None:
    with remote(twin) as proposer, engine_with(directory, LookUp(4), proposer, pays=True) as engine:
        assert generate(engine)[0] == expected


def test_hidden_states_arrive_in_order_and_are_taken_back(directory: Path, expected: list[int]) -> None:
    """The far side checks that each position comes once; a lost stream would show that it did not."""
    with (
        proposing(desk(Looker(), capacity=2)) as address,
        remote(address) as proposer,
        engine_with(directory, proposer) as engine,
    ):
        line = proposer._peers.line
        assert list(proposer.hidden_layers) == [0, 1]
        sequence = engine.open("someone", [])
        assert say(engine, sequence, PROMPT, 40) == expected
        stream = engine.generate(sequence, 500, GREEDY)
        for _ in range(9):
            stream.next_event(10)
        stream.cancel()
        list(stream)
        fork = engine.fork(sequence)
        third = engine.open("someone", [])  # there is no room for it over there
        assert say(engine, third, PROMPT, 40) == expected
        imported = engine.import_state(engine.export_state(sequence), "someone")
        assert say(engine, sequence, [3], 9) == say(engine, fork, [3], 9) == say(engine, imported, [3], 9)
        assert proposer._peers.line is line
        assert line is not None
        assert line.is_open


def test_a_session_that_was_refused_is_opened_again_with_the_next_generate(directory: Path) -> None:
    def refuse(request: pb.ProposeRequest) -> Sequence[pb.ProposeResponse]:
        refusal = pb.ProposeResponse(session_id=request.session_id, refused=pb.Refused(reason="full"))
        return [refusal] if request.HasField("commit") else []

    impostor = Impostor(refuse)
    with (
        impostor.listening() as address,
        remote(address) as proposer,
        engine_with(directory, proposer) as engine,
    ):
        sequence = engine.open("someone", [])
        for _ in range(2):
            say(engine, sequence, PROMPT, 12)
        opened = [each.session_id for each in impostor.heard if each.HasField("open")]
        commits = [each.session_id for each in impostor.heard if each.HasField("commit")]
        assert opened == [1, 2]
        assert len(commits) < 12, "nobody speaks of a session that was refused"


# Wrong, slow, gone, lying, garbled.


def once(*said: pb.ProposeResponse | bytes) -> Answer:
    """Say it after the first commit."""
    left = list(said)

    def answer(request: pb.ProposeRequest) -> Sequence[pb.ProposeResponse | bytes]:
        if not request.HasField("commit"):
            return []
        now, left[:] = left[:], []
        return now

    return answer


LIES = {
    "a token beyond the vocabulary": block(1, 1, len(PROMPT), [tiny.VOCAB]),
    "a session that nobody opened": block(7, 1, len(PROMPT), [3]),
    "a session without a number": block(0, 1, len(PROMPT), [3]),
    "an epoch to come": block(1, 1000, len(PROMPT), [3]),
    "more tokens than asked for": block(1, 1, len(PROMPT), [3] * 40),
    "a position of the past": block(1, 1, 2, [3]),
    "a position of the future": block(1, 1, 10_000, [3]),
    "no message at all": b"\xff\xff\xff garbage",
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_who_lies_is_left(
    directory: Path, expected: list[int], lie: pb.ProposeResponse | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    impostor = Impostor(once(lie))
    with (
        impostor.listening() as address,
        remote(address) as proposer,
        engine_with(directory, proposer) as engine,
    ):
        line = proposer._peers.line
        assert line is not None
        assert generate(engine) == (expected, 0, 0)
        until(lambda: not line.is_open)
        assert f"the proposer at {address} is left" in caplog.text
        if not isinstance(lie, bytes):
            assert line.is_distrusted
            assert impostor.streams == 1, "it is not called again for a while"


def test_wrong_guesses_change_nothing(directory: Path, expected: list[int]) -> None:
    half_right = [token if place % 3 else 60 - token for place, token in enumerate(expected)]
    with (
        Impostor(Script(half_right)).listening() as address,
        remote(address) as proposer,
        engine_with(directory, proposer) as engine,
    ):
        tokens, accepted, proposed = drafted(engine)
        assert tokens == expected
        assert proposed > accepted
        line = proposer._peers.line
        assert line is not None
        assert line.is_open, "to be wrong is no lie"


def test_a_peer_that_says_nothing_is_not_waited_for(directory: Path, expected: list[int]) -> None:
    script = Script(expected)
    script.is_silent = True
    with waiting(directory, script, step=0.0) as (engine, waits, _):
        assert generate(engine) == (expected, 0, 0)
    assert waits == []


def test_a_peer_that_goes_is_gone_at_once_and_found_again(directory: Path, expected: list[int]) -> None:
    with ExitStack() as stack:
        near = stack.enter_context(ExitStack())
        address = near.enter_context(proposing(desk(small_model(directory, CONFIG))))
        port = address.rpartition(":")[2]
        proposer = stack.enter_context(remote(address))
        engine = stack.enter_context(engine_with(directory, proposer))
        assert drafted(engine)[1] > 0
        near.close()
        until(lambda: not (proposer._peers.line and proposer._peers.line.is_open))
        assert generate(engine) == (expected, 0, 0)
        stack.enter_context(
            proposing(desk(small_model(directory, CONFIG)), ServerConfig(bind=f"127.0.0.1:{port}"))
        )
        until(lambda: generate(engine)[1] > 0)


# Waiting.


class Script:
    """A far end that answers each commit after a while, with what plain decoding says."""

    def __init__(self, expected: Sequence[int], seconds: float = 0.0) -> None:
        self._tokens, self.seconds = [*PROMPT, *expected], seconds
        self.is_silent = False

    def __call__(self, request: pb.ProposeRequest) -> Sequence[pb.ProposeResponse]:
        commit = request.commit
        if not commit.wanted or self.is_silent:
            return []
        time.sleep(self.seconds)
        position = commit.start + len(commit.token_ids)
        guess = self._tokens[position : position + min(3, commit.wanted)]
        return [block(request.session_id, commit.epoch, position, guess)] if guess else []


@contextmanager
def waiting(
    directory: Path, script: Script, step: float
) -> Iterator[tuple[Engine, list[float], RemoteProposer]]:
    """An engine with a proposer that guesses only what is asked for, and the times that it waits."""
    with (
        Impostor(script).listening() as address,
        remote(address, ahead=0) as proposer,
        engine_with(directory, proposer, step=step, pays=True) as engine,
    ):
        line, waits = proposer._peers.line, []
        assert line is not None
        wait = line.wait
        line.wait = lambda seconds: (waits.append(seconds), wait(seconds))[1]  # type: ignore[method-assign]
        yield engine, waits, proposer


def test_a_block_that_is_about_to_come_is_waited_for(directory: Path, expected: list[int]) -> None:
    with waiting(directory, Script(expected), step=0.05) as (engine, waits, _):
        for _ in range(3):
            tokens, accepted, proposed = generate(engine)
            assert tokens == expected
            assert accepted == proposed
            if len(waits) > 4:
                break
    assert len(waits) > 4
    assert accepted > 8


def test_a_block_that_takes_longer_than_it_brings_is_not(directory: Path, expected: list[int]) -> None:
    with waiting(directory, Script(expected, 0.3), step=0.01) as (engine, waits, _):
        assert generate(engine)[0] == expected
    assert waits == []


def test_a_peer_that_falls_silent_is_waited_for_once(directory: Path, expected: list[int]) -> None:
    script = Script(expected)
    with waiting(directory, script, step=0.05) as (engine, waits, proposer):
        assert drafted(engine)[1] > 0
        script.is_silent = True
        waits.clear()
        line, lapses = proposer._peers.line, []
        assert line is not None
        is_late = line.is_late
        line.is_late = lambda seconds: (lapses.append(seconds), is_late(seconds))[1]  # type: ignore[method-assign]
        assert generate(engine, 12)[0] == expected[:12]
    assert len(lapses) <= 1
    assert all(seconds >= 0.05 for seconds in lapses), "so nobody waits again: no wait pays that long"
    assert line.turnaround > 0


# The bookkeeping of blocks.


class Sent:
    """A line that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[dict[str, object]] = []
        self.is_open, self.turnaround, self.last_session_id = True, 0.0, 0
        self.block_tokens = 0.0

    def send(self, session_id: int, **change: object) -> None:
        self.messages.append({"id": session_id, **change})

    def new_session_id(self) -> int:
        self.last_session_id += 1
        return self.last_session_id

    def answered(self, seconds: float, tokens: int) -> None:
        self.turnaround = seconds


class Home:
    """Where states are registered."""

    hidden_layers = ()

    def enter(self, state: RemoteState, line: Sent) -> None:
        state.line, state.session_id = line, line.new_session_id()  # type: ignore[assignment]

    def leave(self, state: RemoteState) -> None:
        pass


def told(line: Sent, state: RemoteState, tokens: Sequence[int]) -> None:
    state.tell(line, DraftRequest(state, tokens, 4), 8)  # type: ignore[arg-type]


def take(state: RemoteState, line: Sent, epoch: int, position: int, tokens: Sequence[int]) -> None:
    state.take(pb.Block(epoch=epoch, position=position, token_ids=tokens), time.perf_counter(), line)  # type: ignore[arg-type]


def test_blocks_follow_the_history_or_each_other() -> None:
    line, state = Sent(), RemoteState(Home())  # type: ignore[arg-type]
    told(line, state, [1, 2, 3])
    take(state, line, 1, 3, [4, 5])
    take(state, line, 1, 5, [6])
    assert list(state.guess([1, 2, 3])) == [4, 5, 6]
    told(line, state, [1, 2, 3, 4, 5])
    assert list(state.guess([1, 2, 3, 4, 5])) == [6]
    take(state, line, 2, 6, [7])
    assert list(state.guess([1, 2, 3, 4, 5])) == [6, 7]
    told(line, state, [1, 2, 3, 4, 5, 9])
    assert list(state.guess([1, 2, 3, 4, 5, 9])) == [], "it said otherwise"
    take(state, line, 2, 8, [8])
    assert list(state.guess([1, 2, 3, 4, 5, 9])) == [], "what follows a wrong guess"
    take(state, line, 3, 6, [10, 11])
    assert list(state.guess([1, 2, 3, 4, 5, 9, 10])) == [11], "late, and still right"


def test_a_chain_that_is_used_up_goes_on() -> None:
    line, state = Sent(), RemoteState(Home())  # type: ignore[arg-type]
    told(line, state, [1])
    take(state, line, 1, 1, [2, 3])
    assert list(state.guess([1, 2, 3, 4])) == []
    take(state, line, 1, 3, [4, 5])
    assert list(state.guess([1, 2, 3, 4])) == [5]


def test_a_rollback_makes_earlier_blocks_void() -> None:
    line, state = Sent(), RemoteState(Home())  # type: ignore[arg-type]
    told(line, state, [1, 2, 3])
    take(state, line, 1, 3, [4])
    state.rollback(5)
    assert list(state.guess([1, 2, 3])) == [4], "what was not told is not taken back"
    state.rollback(2)
    take(state, line, 1, 4, [5])
    assert list(state.guess([1, 2])) == []
    rollback = line.messages[-1]["rollback"]
    assert (rollback.epoch, rollback.length) == (2, 2)  # type: ignore[attr-defined]
    told(line, state, [1, 2, 8])
    commit = line.messages[-1]["commit"]
    assert (commit.start, list(commit.token_ids), commit.epoch) == (2, [8], 3)  # type: ignore[attr-defined]


def test_a_fork_is_one_there_too_and_the_end_is_told() -> None:
    line, state = Sent(), RemoteState(Home())  # type: ignore[arg-type]
    assert state.fork().line is None, "nobody was told of it yet"
    told(line, state, [1, 2, 3])
    twin = state.fork()
    told(line, twin, [1, 2, 3, 4])
    fork, commit = line.messages[-2:]
    assert fork["id"] == commit["id"] == 2
    assert fork["fork"].from_session_id == 1  # type: ignore[attr-defined]
    assert list(commit["commit"].token_ids) == [4]  # type: ignore[attr-defined]
    twin.close()
    assert "drop" in line.messages[-1]
    twin.close()
    assert len([each for each in line.messages if "drop" in each]) == 1


def test_long_histories_travel_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kakeya.proposers.remote._MOST_IDS", 4)
    line, state = Sent(), RemoteState(Home())  # type: ignore[arg-type]
    told(line, state, list(range(10)))
    commits = [each["commit"] for each in line.messages if "commit" in each]
    assert [list(each.token_ids) for each in commits] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]  # type: ignore[attr-defined]
    assert [each.wanted for each in commits] == [0, 0, 8]  # type: ignore[attr-defined]


def test_what_is_seen_of_a_refused_session_goes_nowhere() -> None:
    line, state = Sent(), RemoteState(Home())  # type: ignore[arg-type]
    state.show(0, {0: torch.ones(2, 4)})
    told(line, state, [1, 2, 3])
    state.show(0, {0: torch.ones(2, 4), 1: torch.ones(2, 4)})
    seen = [each["observe"] for each in line.messages if "observe" in each]
    assert [(each.layer, each.start, each.rows, len(each.values)) for each in seen] == [
        (0, 0, 2, 16),
        (1, 0, 2, 16),
    ]
    state.is_refused, count = True, len(line.messages)
    state.show(2, {0: torch.ones(1, 4)})
    assert len(line.messages) == count


def test_a_block_that_can_no_longer_be_used_is_not_awaited() -> None:
    line, state = Sent(), RemoteState(Home())  # type: ignore[arg-type]
    line.turnaround, line.block_tokens = 0.5, 2.0
    told(line, state, [1, 2])

    def awaited(tokens: Sequence[int]) -> float | None:
        request = DraftRequest(state, tokens, 4, chance=0.5, worth=float)
        found = state.on_its_way(request, line)  # type: ignore[arg-type]
        return None if found is None else found.worth

    assert awaited([1, 2]) == 2.0
    assert awaited([1, 2, 3]) == 0.5, "one token of it, if the other one is right"
    assert awaited([1, 2, 3, 4]) is None
    state.give_up()
    assert awaited([1, 2]) is None


def test_without_a_peer_there_are_no_guesses() -> None:
    with remote(f"127.0.0.1:{free_port()}") as proposer:
        state = proposer.new_state()
        request = DraftRequest(state, [1, 2], 4)
        proposer.expect(request)
        proposer.observe(state, 0, {0: torch.ones(1, 4)})
        assert proposer.propose([request]) == [()]
        state.close()


def test_how_far_ahead_is_guessed(twin: str) -> None:
    with remote(twin, ahead=20) as proposer, remote(twin, ahead=0) as patient:
        line, state = Sent(), proposer.new_state()

        def wanted(by: RemoteProposer, chance: float, turnaround: float, step: float) -> int:
            line.turnaround, state.step_seconds = turnaround, step
            return by._wanted(DraftRequest(state, [1], 4, chance=chance), line, state)  # type: ignore[arg-type]

        assert wanted(patient, 0.9, 0.01, 0.01) == 4
        assert wanted(proposer, 0.95, 0.0, 0.0) == 9, "this draft, and the next"
        assert wanted(proposer, 0.95, 0.01, 0.01) == 14, "and one more for each step of the round trip"
        assert wanted(proposer, 0.95, 1.0, 0.01) == 24
        assert wanted(proposer, 0.5, 1.0, 0.01) == 5, "not what is unlikely to be right"
        assert wanted(proposer, 0.0, 1.0, 0.01) == 4


def test_the_doors_that_every_such_proposer_has(twin: str) -> None:
    ahead = WorksAhead()
    assert ahead.close() is None
    with remote(twin) as proposer:
        state = proposer.restore({})
        assert state.export() == {}
        assert ahead.expect(DraftRequest(state, [1], 1)) is None
        assert DraftRequest(state, [1], 1).worth(4) == 0.0

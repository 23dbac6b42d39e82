"""Steps: those that fail, and those that are launched before the last one's tokens are read."""

import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from kakeya.engine.backend import Backend, LaunchedStep, StepResult
from kakeya.engine.batch import PENDING, Segment
from kakeya.engine.engine import Engine
from kakeya.engine.sampler import SampleRequest
from kakeya.engine.slab import KVSlab
from kakeya.errors import InvariantViolation, StepFailed
from kakeya.types import SamplingParams, TokenEvent
from support import tiny
from support.engines import GREEDY, Hooked, RunsAhead, say, tokens_of
from support.reference import Oracle

PROMPT = [5, 9, 22, 13, 7]
LONG = 300
PATIENT = 16  # spare slots for a whole answer, so that the engine never waits for a slow reader
MakeAhead = Callable[..., tuple[Engine, "Watched"]]


class Watched(RunsAhead):
    """Notes what is launched, and how many steps nobody has read yet; `spoil` makes results fail."""

    def __init__(self, source: Backend) -> None:
        super().__init__(source)
        self.unread = 0
        self.most_unread = 0
        self.launched: list[list[int]] = []
        self.spoil: Callable[[int, Sequence[Segment]], bool] = lambda step, segments: False

    def _run(
        self, segments: Sequence[Segment], requests: Sequence[SampleRequest], hidden_layers: Sequence[int]
    ) -> LaunchedStep:
        step = len(self.launched)
        self.launched.append([s.tokens[0] for s in segments])
        launched = super()._run(segments, requests, hidden_layers)
        self.unread += 1
        self.most_unread = max(self.most_unread, self.unread)
        return _Unread(self, launched, self.spoil(step, segments))


class _Unread:
    def __init__(self, watched: Watched, launched: LaunchedStep, spoilt: bool) -> None:
        self._watched, self._launched, self._spoilt = watched, launched, spoilt

    def result(self) -> StepResult:
        self._watched.unread -= 1
        if self._spoilt:
            raise StepFailed("spoilt")
        return self._launched.result()


@pytest.fixture
def make_ahead(decoder: tiny.Model) -> Iterator[MakeAhead]:
    engines: list[Engine] = []

    def make(**changes: object) -> tuple[Engine, Watched]:
        config = tiny.engine_config(**changes)
        backend = Watched(tiny.make_backend(decoder, config))
        engines.append(Engine(backend, config).start())
        return engines[-1], backend

    yield make
    for engine in engines:
        engine.shutdown()


def test_the_next_step_is_launched_before_the_last_is_read(make_ahead: MakeAhead, oracle: Oracle) -> None:
    engine, backend = make_ahead(spare=PATIENT)
    assert say(engine, engine.open("someone", []), PROMPT, 10) == oracle.greedy(PROMPT, 10, 2, 8)
    assert backend.most_unread == 2
    assert backend.repeated_steps == 8
    # The prompt, its first token (known by then), and eight that nobody had seen.
    assert [tokens[0] == PENDING for tokens in backend.launched] == [False, False] + [True] * 8


def test_no_token_is_computed_beyond_the_last_one_asked_for(make_ahead: MakeAhead) -> None:
    engine, backend = make_ahead()
    say(engine, engine.open("someone", []), PROMPT, 6)
    assert len(backend.launched) == 6


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.3),
        SamplingParams(logprobs=True),
        SamplingParams(logit_bias={3: 1.0}),
    ],
)
def test_what_the_host_must_see_is_not_run_ahead_of(make_ahead: MakeAhead, sampling: SamplingParams) -> None:
    engine, backend = make_ahead()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    assert len(tokens_of(engine.generate(sequence, 5, sampling))) == 5
    assert backend.most_unread == 1
    assert backend.pending_rows == 0


def test_the_row_behind_an_end_of_sequence_is_forgotten(make_ahead: MakeAhead, oracle: Oracle) -> None:
    engine, backend = make_ahead(spare=PATIENT)
    answer = oracle.greedy(PROMPT, 8, 2, 8)
    eos = answer[3]
    expected = answer[: answer.index(eos) + 1]
    sequence = engine.open("someone", [eos])
    assert say(engine, sequence, PROMPT, 8) == expected
    written, committed = engine.read(sequence, lambda s: (s.slab.written, s.committed))
    assert (written, committed) == (committed - 1, len(PROMPT) + len(expected))
    assert len(backend.launched) == len(expected) + 1  # one too many, for nothing
    history = [*PROMPT, *expected, 30]
    again = oracle.greedy(history, 4, 2, 8)
    cut = again.index(eos) + 1 if eos in again else 4
    assert say(engine, sequence, [30], 4) == again[:cut]


def test_a_cancel_keeps_what_was_taken_whatever_is_in_flight(make_ahead: MakeAhead, oracle: Oracle) -> None:
    engine, _ = make_ahead()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    stream = engine.generate(sequence, 1000, GREEDY)
    taken = [stream.next_event(10) for _ in range(7)]
    stream.cancel()
    engine.rest(sequence)
    tokens = [event.token_id for event in taken]  # type: ignore[union-attr]
    history = engine.read(sequence, lambda s: s.tokens.tolist())
    assert history[: len(PROMPT) + 7] == PROMPT + tokens
    assert say(engine, sequence, [30], 4) == oracle.greedy([*history, 30], 4, 2, 8)


def test_a_step_that_failed_is_run_again_without_what_followed_it(
    make_ahead: MakeAhead, oracle: Oracle
) -> None:
    engine, backend = make_ahead()
    # The fifth step fails as it is read, when the sixth is on its way; alone, each segment is fine.
    backend.spoil = lambda step, segments: step == 4 and len(segments) > 1
    prompts = [[5, 9, 22], [13, 7, 40], [8, 8, 1]]
    sequences = [engine.open("someone", []) for _ in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        engine.append(sequence, prompt)
    streams = [engine.generate(sequence, 9, GREEDY) for sequence in sequences]
    for stream, prompt in zip(streams, prompts, strict=True):
        assert tokens_of(stream) == oracle.greedy(prompt, 9, 2, 8)


def test_only_the_guilty_of_a_failed_step_fails(make_ahead: MakeAhead, oracle: Oracle) -> None:
    engine, backend = make_ahead()
    good, bad = engine.open("good", []), engine.open("bad", [])
    backend.spoil = lambda step, segments: step >= 4 and any(s.sequence is bad for s in segments)
    for sequence in (good, bad):
        engine.append(sequence, PROMPT)
    streams = [engine.generate(sequence, 12, GREEDY) for sequence in (good, bad)]
    assert tokens_of(streams[0]) == oracle.greedy(PROMPT, 12, 2, 8)
    with pytest.raises(StepFailed, match="spoilt"):
        tokens_of(streams[1])
    backend.spoil = lambda step, segments: False
    history = engine.read(bad, lambda s: s.tokens.tolist())
    assert say(engine, bad, [30], 3) == oracle.greedy([*history, 30], 3, 2, 8)


def test_a_prompt_joins_those_that_run_ahead(make_ahead: MakeAhead, oracle: Oracle) -> None:
    engine, backend = make_ahead()
    early = engine.open("someone", [])
    engine.append(early, PROMPT)
    stream = engine.generate(early, 40, GREEDY)
    first = [stream.next_event(10) for _ in range(3)]
    late_prompt = list(range(2, 30))
    assert say(engine, engine.open("other", []), late_prompt, 5) == oracle.greedy(late_prompt, 5, 2, 8)
    tokens = [event.token_id for event in first] + tokens_of(stream)  # type: ignore[union-attr]
    assert tokens == oracle.greedy(PROMPT, 40, 2, 8)
    assert backend.most_unread == 2


def test_without_spare_slots_nothing_runs_ahead_of_its_reader(make_ahead: MakeAhead, oracle: Oracle) -> None:
    engine, backend = make_ahead(spare=0)
    assert say(engine, engine.open("someone", []), PROMPT, 8) == oracle.greedy(PROMPT, 8, 2, 8)
    assert backend.pending_rows == 0


@pytest.mark.slow
def test_a_repeated_step_that_failed_is_run_again_where_it_was(
    make_ahead: MakeAhead, make_engine: Callable[[], Engine]
) -> None:
    engine, backend = make_ahead(spare=LONG)
    # Alone it would fail its request, so there are two; the failure comes once, when steps repeat each other.
    failures = iter([True])
    backend.spoil = lambda step, segments: (
        len(segments) == 2 and backend.repeated_steps >= 3 and next(failures, False)
    )
    assert answers_of_two(engine) == answers_of_two(make_engine())
    assert next(failures, None) is None


@pytest.mark.slow
def test_a_step_that_cannot_be_repeated_is_run_again(
    make_ahead: MakeAhead, make_engine: Callable[[], Engine]
) -> None:
    engine, backend = make_ahead(spare=LONG)
    follow, refusals = backend.follow, iter([True])

    def refuse_once(step: LaunchedStep) -> LaunchedStep:
        if len(backend.launched[-1]) == 2 and next(refusals, False):
            raise RuntimeError("not now")
        return follow(step)

    backend.follow = refuse_once  # type: ignore[method-assign]
    assert answers_of_two(engine) == answers_of_two(make_engine())
    assert next(refusals, None) is None


def answers_of_two(engine: Engine) -> list[list[int]]:
    """Long enough that the second is there long before the first has ended."""
    sequences = [engine.open("someone", []) for _ in range(2)]
    for sequence, prompt in zip(sequences, ([5, 9, 22], [13, 7, 40]), strict=True):
        engine.append(sequence, prompt)
    streams = [engine.generate(sequence, LONG, GREEDY) for sequence in sequences]
    return [tokens_of(stream) for stream in streams]


MakeEngine = Callable[..., Engine]


# Failures.


def test_a_failing_step_fails_its_own_request_only(
    hooked: Callable[..., tuple[Engine, Hooked]], oracle: Oracle
) -> None:
    def before(segments: Sequence[Segment]) -> None:
        if any(s.sequence.owner == "cursed" and s.end > 20 for s in segments):
            raise RuntimeError("boom")

    engine, _ = hooked(before)
    good, cursed = engine.open("good", []), engine.open("cursed", [])
    engine.append(good, PROMPT * 6)
    engine.append(cursed, PROMPT * 3)
    streams = engine.generate(good, 30, GREEDY), engine.generate(cursed, 30, GREEDY)
    spoken: list[int] = []
    readers = threading.Thread(target=lambda: spoken.extend(tokens_of(streams[0])))
    readers.start()
    received = []
    with pytest.raises(StepFailed, match="boom"):
        received.extend(streams[1])
    readers.join()
    assert spoken == oracle.greedy(PROMPT * 6, 30, 2, 8)
    # What was received before the failure is history, and the session is usable.
    kept = [e.token_id for e in received if isinstance(e, TokenEvent)]
    assert engine.read(cursed, lambda s: s.tokens.tolist()) == PROMPT * 3 + kept
    engine.append(cursed, [4])


def test_a_failed_prompt_block_past_the_wrap_is_undone(
    hooked: Callable[..., tuple[Engine, Hooked]], oracle: Oracle
) -> None:
    """The block overwrote ring slots that are still needed; they must come back."""

    def broken(logits: Tensor, requests: object) -> list[TokenEvent]:
        raise MemoryError("no room to choose")

    engine, backend = hooked(lambda segments: None, prefill_block=32)
    sequence = engine.open("someone", [])
    first = say(engine, sequence, PROMPT * 4, 2)
    engine.append(sequence, PROMPT * 5)
    real, backend._sample = backend._sample, broken
    with pytest.raises(StepFailed, match="no room to choose"):
        tokens_of(engine.generate(sequence, 3, GREEDY))
    backend._sample = real
    spoken = [*PROMPT * 4, *first, *PROMPT * 5]
    assert tokens_of(engine.generate(sequence, 3, GREEDY)) == oracle.greedy(spoken, 3, 2, 8)


def test_broken_bookkeeping_fails_and_frees_the_session(make_engine: MakeEngine) -> None:
    engine = make_engine()
    sequence, other = engine.open("someone", []), engine.open("other", [])
    engine.append(sequence, PROMPT)
    say(engine, sequence, [], 2)
    sequence.slab.committed = 99
    engine.append(other, PROMPT)
    with pytest.raises(InvariantViolation, match="INV-2"):
        engine.append(sequence, [3])
    assert engine.read(sequence, lambda s: (s.inv1_violations, s.inv2_violations)) == (0, 1)
    with pytest.raises(InvariantViolation):
        engine.generate(sequence, 1, GREEDY)
    for _ in range(3):  # its slab is free again
        engine.open("someone", [])
    assert len(say(engine, other, [], 2)) == 2


@pytest.mark.parametrize("decoder", ["torch"], indirect=True)
def test_a_layer_that_was_not_written_is_an_inv1_violation(
    decoder: tiny.Model, monkeypatch: pytest.MonkeyPatch, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    monkeypatch.setattr(type(decoder), "forward", lambda self, ids, attend, tap: torch.zeros(len(ids), 32))
    with pytest.raises(InvariantViolation, match="INV-1"):
        tokens_of(engine.generate(sequence, 2, GREEDY))
    assert engine.read(sequence, lambda s: s.inv1_violations) == 1


def test_a_slab_that_cannot_be_reserved_fails_its_own_request(
    make_engine: MakeEngine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    good, bad = engine.open("good", []), engine.open("bad", [])
    reserve = KVSlab.reserve

    def without_memory(slab: KVSlab, rows: int) -> int:
        if slab is bad.slab:
            raise MemoryError("no room to save what is overwritten")
        return reserve(slab, rows)

    monkeypatch.setattr(KVSlab, "reserve", without_memory)
    for sequence in (good, bad):
        engine.append(sequence, PROMPT)
    streams = [engine.generate(sequence, 6, GREEDY) for sequence in (good, bad)]
    assert tokens_of(streams[0]) == oracle.greedy(PROMPT, 6, 2, 8)
    with pytest.raises(StepFailed, match="no room to save"):
        tokens_of(streams[1])

"""A drafter on the device: the same tokens as without it, whatever it guesses; fewer steps if it is right."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kakeya.engine.batch import Segment
from kakeya.engine.cpu.backend import CpuBackend
from kakeya.engine.cuda.shapes import StepShape
from kakeya.engine.engine import Engine
from kakeya.engine.own_drafts import OwnDrafts
from kakeya.engine.proposer import DraftRequest
from kakeya.engine.sequence import TokenSequence
from kakeya.kernels.gpu import DraftTable
from kakeya.models.checkpoint import open_checkpoint
from kakeya.proposers.drafter import TrainedDrafter
from kakeya.types import DoneEvent, Event, Numerics, SamplingParams, StopReason, TokenEvent
from support import tiny
from support.engines import GREEDY, say, tokens_of

PROMPT = [5, 9, 22, 13, 7]
OTHERS = [[3, 3, 8], [40, 1, 2, 9, 12, 33], [17]]
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=11)
WINDOW, SPARE = 12, 16
LONG = 40  # more than a turn of the ring

Guess = Callable[[int, int], int]  # what is guessed for the slab at the position


class Drafting:
    """An engine that drafts `count` tokens in every step it can, and what its steps were."""

    def __init__(self, directory: Path, count: int = 3, **changes: object) -> None:
        self.config = tiny.engine_config(**({"spare": SPARE, "window": WINDOW, "capacity": 4} | changes))
        drafter = tiny.random_drafter(open_checkpoint(directory).config, block=8)
        self.backend = tiny.make_device_backend(directory, self.config, drafter=drafter)
        self.shapes: list[StepShape] = []
        run = self.backend._graphs._run
        self.backend._graphs._run = lambda shape: (self.shapes.append(shape), run(shape))[1]
        self.engine = Engine(self.backend, self.config)
        self.fix(count)
        self.engine.start()

    def fix(self, count: int) -> None:
        own_drafts = OwnDrafts(self.backend.draft_counts, self.backend.most_drafting)
        own_drafts.count = lambda sessions: count  # type: ignore[method-assign]
        self.engine._stepper._own_drafts = own_drafts

    def know(self, guess: Guess) -> None:
        """Draft what `guess` says instead of what the network thinks."""
        backend, drafter = self.backend, self.backend._drafter
        assert drafter is not None

        def draft(shape: StepShape, rotations: Sequence[Tensor], newest: Tensor) -> None:
            table = backend._tables.drafts(shape)
            for row in range(shape.sessions, shape.rows):
                slab = int(table.slabs[row])
                if slab >= 0:
                    table.token_ids[row] = guess(slab, int(table.positions[row]))

        drafter.draft = draft  # type: ignore[method-assign]

    @property
    def drafting_steps(self) -> int:
        return sum(shape.drafts > 0 for shape in self.shapes)


@pytest.fixture
def drafting(tiny_llama: Path) -> Iterator[Drafting]:
    it = Drafting(tiny_llama)
    yield it
    it.engine.shutdown()


@pytest.fixture
def plain(tiny_llama: Path) -> Iterator[Engine]:
    config = tiny.engine_config(spare=SPARE, window=WINDOW, capacity=4)
    engine = Engine(tiny.make_device_backend(tiny_llama, config), config).start()
    yield engine
    engine.shutdown()


def known(histories: Mapping[int, Sequence[int]]) -> Guess:
    """Always right, as far as the histories by slab go."""
    return lambda slab, position: histories[slab][position] if position < len(histories[slab]) else 0


@pytest.mark.unwatched
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("count", [7, LONG])
@pytest.mark.parametrize("guesses", ["its own", "right", "wrong", "every other"])
def test_the_tokens_are_those_of_plain_decoding(
    drafting: Drafting, plain: Engine, sampling: SamplingParams, count: int, guesses: str
) -> None:
    expected = say(plain, plain.open("a", []), PROMPT, count, sampling)
    sequence = drafting.engine.open("a", [])
    right = known({sequence.slab.index: [*PROMPT, *expected]})
    if guesses != "its own":
        errs = {"right": 0, "wrong": 1, "every other": 2}[guesses]
        drafting.know(lambda slab, at: right(slab, at) + bool(errs and at % errs == 0))
    assert say(drafting.engine, sequence, PROMPT, count, sampling) == expected
    if guesses == "right" and count == LONG:
        assert drafting.drafting_steps <= count // 4 + 2  # and those that were on their way at the end


@pytest.mark.parametrize("numerics", list(Numerics))
def test_sessions_together_are_told_apart(tiny_llama: Path, numerics: Numerics) -> None:
    """Of different lengths, some right and some wrong, with room for one more in the step."""
    drafting = Drafting(tiny_llama, numerics=numerics)
    config = tiny.engine_config(spare=SPARE, window=WINDOW, capacity=4, numerics=numerics)
    plain = Engine(tiny.make_device_backend(tiny_llama, config), config).start()
    expected = [say(plain, plain.open("a", []), prompt, 40) for prompt in OTHERS]
    sequences = [drafting.engine.open("a", []) for _ in OTHERS]
    slabs = {s.slab.index: [*p, *e] for s, p, e in zip(sequences, OTHERS, expected, strict=True)}
    wrong = sequences[1].slab.index
    right = known(slabs)
    drafting.know(lambda slab, at: right(slab, at) + (slab == wrong))
    for sequence, prompt in zip(sequences, OTHERS, strict=True):
        drafting.engine.append(sequence, prompt)
    streams = [drafting.engine.generate(sequence, 40, GREEDY) for sequence in sequences]
    assert [tokens_of(stream) for stream in streams] == expected
    assert drafting.drafting_steps
    drafting.engine.shutdown()
    plain.shutdown()


def test_a_run_ends_at_an_end_token_in_its_middle(drafting: Drafting, plain: Engine) -> None:
    expected = say(plain, plain.open("a", []), PROMPT, 30)
    last = expected[6]
    ends_at = expected.index(last)
    sequence = drafting.engine.open("a", [last])
    drafting.know(known({sequence.slab.index: [*PROMPT, *expected]}))
    *tokens, done = _events(drafting, sequence, 30)
    assert [event.token_id for event in tokens if isinstance(event, TokenEvent)] == expected[: ends_at + 1]
    assert isinstance(done, DoneEvent)
    assert done.stop_reason is StopReason.EOS
    # The history goes on as if nothing had been guessed beyond its end.
    ended = plain.open("a", [last])
    say(plain, ended, PROMPT, 30)
    assert say(drafting.engine, sequence, [3, 4], 20) == say(plain, ended, [3, 4], 20)


def _events(drafting: Drafting, sequence: TokenSequence, count: int) -> list[Event]:
    drafting.engine.append(sequence, PROMPT)
    return list(drafting.engine.generate(sequence, count, GREEDY))


def test_drafts_are_counted(drafting: Drafting, plain: Engine) -> None:
    expected = say(plain, plain.open("a", []), PROMPT, 41)
    sequence = drafting.engine.open("a", [])
    drafting.know(known({sequence.slab.index: [*PROMPT, *expected]}))
    done = _events(drafting, sequence, 41)[-1]
    assert isinstance(done, DoneEvent)
    assert done.accepted_draft_tokens == done.proposed_draft_tokens == 30


def test_a_cancel_keeps_what_was_taken(drafting: Drafting, plain: Engine) -> None:
    twin, sequence = plain.open("a", []), drafting.engine.open("a", [])
    expected = say(plain, twin, PROMPT, 60)
    drafting.know(known({sequence.slab.index: [*PROMPT, *expected]}))
    drafting.engine.append(sequence, PROMPT)
    stream = drafting.engine.generate(sequence, 60, GREEDY)
    events = iter(stream)
    taken = [next(events) for _ in range(37)]
    stream.cancel()
    list(events)
    assert [event.token_id for event in taken if isinstance(event, TokenEvent)] == expected[:37]
    again = plain.open("a", [])
    plain.append(again, [*PROMPT, *expected[:37]])
    assert say(drafting.engine, sequence, [8], 30) == say(plain, again, [8], 30)


def test_forks_and_exports_go_on(drafting: Drafting, plain: Engine) -> None:
    """The drafter's keys and values go with the session; a session without them goes on all the same."""
    sequence, twin = drafting.engine.open("a", []), plain.open("a", [])
    assert say(drafting.engine, sequence, PROMPT, 40) == say(plain, twin, PROMPT, 40)
    state = drafting.engine.export_state(sequence)
    without = plain.export_state(twin)
    assert state.geometry == without.geometry
    assert state.storage.shape == without.storage.shape
    copies = [
        drafting.engine.fork(sequence),
        drafting.engine.import_state(state, "a"),
        drafting.engine.import_state(without, "a"),
    ]
    expected = say(plain, twin, [4, 4], 30)
    for copy in copies:
        assert say(drafting.engine, copy, [4, 4], 30) == expected
    own = drafting.backend.pool.geometry.model_layers
    first, second = (copy.slab.storage[own:] for copy in copies[:2])
    assert torch.equal(first, second)
    assert first.any()
    drafting.engine.close(copies[1])
    assert say(plain, plain.import_state(state, "a"), [4, 4], 30) == expected


def test_what_the_host_must_choose_is_not_drafted(drafting: Drafting, plain: Engine) -> None:
    penal = SamplingParams(repetition_penalty=1.3)
    expected = say(plain, plain.open("a", []), PROMPT, 20, penal)
    assert say(drafting.engine, drafting.engine.open("a", []), PROMPT, 20, penal) == expected
    assert not drafting.drafting_steps


def test_a_slow_reader_stops_the_drafts(drafting: Drafting) -> None:
    """No more is on its way than a cancel can take back."""
    sequence = drafting.engine.open("a", [])
    drafting.engine.append(sequence, PROMPT)
    stream = drafting.engine.generate(sequence, 500, GREEDY)
    spare = drafting.config.cache.spare
    while stream.unread + 4 < spare:
        time.sleep(0.001)
    drafting.engine.read(sequence, lambda it: None)
    slab = sequence.slab
    assert slab.written - slab.committed <= spare + 1
    stream.cancel()


def test_the_device_guesses_what_the_processor_guesses(tiny_llama: Path) -> None:
    """The same drafter over the same history, as a proposer on a CPU and inside the backend."""
    drafting = Drafting(tiny_llama, window=200)
    stored = tiny.random_drafter(open_checkpoint(tiny_llama).config, block=8)
    decoder = tiny.load(tiny_llama, drafting.config)
    cpu = tiny.make_backend(decoder, drafting.config)
    proposer = TrainedDrafter(stored, cpu, decoder.config, drafting.config, None)
    guessed: list[tuple[int, list[int]]] = []
    drafter = drafting.backend._drafter
    assert drafter is not None
    judge = drafter._kernels.drafts.judge

    def note(table: DraftTable, sampled: Tensor, *rest: Tensor) -> None:
        guessed.append((int(table.positions[0]), table.token_ids[1:4].tolist()))
        judge(table, sampled, *rest)

    drafter._kernels.drafts.judge = note  # type: ignore[method-assign]
    tokens = [*PROMPT, *say(drafting.engine, drafting.engine.open("a", []), PROMPT, 30)]
    drafting.engine.shutdown()
    hidden = _outputs(cpu, tokens, stored.config.taps)
    for position, guesses in guessed[:20]:
        state = proposer.new_state()
        proposer.observe(state, 0, {layer: rows[:position] for layer, rows in hidden.items()})
        request = DraftRequest(state, tokens[: position + 1], 3)
        assert list(proposer.propose([request])[0]) == guesses
        state.close()


def _outputs(backend: CpuBackend, tokens: Sequence[int], layers: Sequence[int]) -> Mapping[int, Tensor]:
    """The outputs of these layers at every position."""
    sequence = TokenSequence(backend.pool.allocate(), "a", (), None)
    start = sequence.slab.reserve(len(tokens))
    return backend.run([Segment(sequence, start, list(tokens), 0, 0)], layers).hidden


def test_the_plan_has_room_for_the_drafter(tiny_llama: Path) -> None:
    drafting = Drafting(tiny_llama)
    drafting.engine.shutdown()
    geometry = drafting.backend.pool.geometry
    assert geometry.layers == geometry.model_layers + 1
    assert drafting.backend.draft_counts == (3, 7)

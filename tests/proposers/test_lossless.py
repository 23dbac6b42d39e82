"""Whatever a proposer guesses, the tokens are those of plain decoding."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kakeya.config import EngineConfig
from kakeya.engine.draft_length import DraftLength
from kakeya.engine.engine import Engine
from kakeya.engine.proposer import DraftRequest, Proposer
from kakeya.proposers.model import SmallModel
from kakeya.proposers.ngram import LookUp
from kakeya.types import DoneEvent, Numerics, SamplingParams, TokenEvent
from support import tiny
from support.engines import GREEDY, FunctionProposer, say

PROMPT = [5, 9, 22, 13, 7, 5, 9, 22, 13, 40, 5, 9, 22]
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=1.0, seed=3),
    "penalized": SamplingParams(temperature=0.8, seed=5, repetition_penalty=1.2, frequency_penalty=0.3),
    "with logprobs": SamplingParams(temperature=0.7, top_p=0.9, seed=9, logprobs=True, top_logprobs=3),
}
CONFIG = tiny.engine_config(window=30, spare=8, numerics=Numerics.EXACT, threads=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("verifier"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says something else."""
    return tiny.write_llama(tmp_path_factory.mktemp("proposer"), seed=7)


def small_model(directory: Path, config: EngineConfig = CONFIG) -> SmallModel:
    return SmallModel(tiny.make_backend(tiny.load(directory, config), config), 4, at_once=5)


def at_random(tokens: Sequence[int]) -> list[int]:
    return [random.Random(len(tokens)).randrange(tiny.VOCAB) for _ in range(3)]


def raising(tokens: Sequence[int]) -> list[int]:
    if len(tokens) > len(PROMPT) + 5:
        raise ValueError("a proposer's bug")
    return [1, 2]


Make = Callable[[Path, Path], Sequence[Proposer]]
# Always: all that is guessed is drafted.
ALWAYS: dict[str, Make] = {
    "look-up": lambda directory, other: [LookUp(4)],
    "the model itself": lambda directory, other: [small_model(directory)],
    "another model": lambda directory, other: [small_model(other)],
    "at random": lambda directory, other: [FunctionProposer(at_random)],
    "raising": lambda directory, other: [LookUp(4), FunctionProposer(raising)],
}
AS_IT_PAYS: dict[str, Make] = {
    "look-up, as it pays": lambda directory, other: [LookUp(4)],
    "both, as it pays": lambda directory, other: [LookUp(4), small_model(directory)],
}


@pytest.fixture(scope="module", params=[*ALWAYS, *AS_IT_PAYS])
def engine(request: pytest.FixtureRequest, directory: Path, other: Path) -> Iterator[Engine]:
    length = DraftLength() if request.param in AS_IT_PAYS else None
    proposers = (ALWAYS | AS_IT_PAYS)[request.param](directory, other)
    backend = tiny.make_backend(tiny.load(directory, CONFIG), CONFIG)
    engine = Engine(backend, CONFIG, proposers, length=length).start()
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def plain(directory: Path) -> Iterator[Engine]:
    engine = Engine(tiny.make_backend(tiny.load(directory, CONFIG), CONFIG), CONFIG).start()
    yield engine
    engine.shutdown()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_tokens_are_those_of_plain_decoding(plain: Engine, engine: Engine, sampling: SamplingParams) -> None:
    """Past the window, over two turns, with their log-probabilities."""

    def talk(engine: Engine) -> list[TokenEvent]:
        sequence, said = engine.open("someone", []), []
        for message in (PROMPT, [3, 4]):
            engine.append(sequence, message)
            said += [e for e in engine.generate(sequence, 24, sampling) if isinstance(e, TokenEvent)]
        engine.close(sequence)
        return said

    assert talk(engine) == talk(plain)


def test_forks_and_imports_go_on_alike(plain: Engine, engine: Engine) -> None:
    def talk(engine: Engine) -> list[list[int]]:
        sequence = engine.open("someone", [])
        said = [say(engine, sequence, PROMPT, 20)]
        fork = engine.fork(sequence)
        imported = engine.import_state(engine.export_state(sequence), "someone")
        said += [say(engine, each, [8, 8], 12) for each in (sequence, fork, imported)]
        for each in (sequence, fork, imported):
            engine.close(each)
        return said

    assert talk(engine) == talk(plain)


def test_a_cancel_keeps_what_was_taken(plain: Engine, engine: Engine) -> None:
    sequence, twin = engine.open("someone", []), plain.open("someone", [])
    for _ in range(4):
        engine.append(sequence, PROMPT)
        stream = engine.generate(sequence, 500, GREEDY)
        taken = [stream.next_event(10) for _ in range(9)]
        stream.cancel()
        kept = [event.token_id for event in [*taken, *stream] if isinstance(event, TokenEvent)]
        assert kept == say(plain, twin, PROMPT, len(kept))
    assert say(engine, sequence, [4], 10) == say(plain, twin, [4], 10)
    engine.close(sequence)
    plain.close(twin)


def test_sessions_together_are_as_alone(plain: Engine, engine: Engine) -> None:
    prompts = [PROMPT, [1, 2, 3, 1, 2, 3, 1, 2], [40] * 6]
    sequences = [engine.open("someone", []) for _ in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        engine.append(sequence, prompt)
    streams = [engine.generate(sequence, 30, GREEDY) for sequence in sequences]
    together = [[] for _ in streams]
    for _ in range(30):
        for said, stream in zip(together, streams, strict=True):
            said.append(stream.next_event(10).token_id)
    for stream in streams:
        list(stream)
    for sequence in sequences:
        engine.close(sequence)
    for said, prompt in zip(together, prompts, strict=True):
        alone = plain.open("someone", [])
        assert said == say(plain, alone, prompt, 30)
        plain.close(alone)


def test_the_model_itself_guesses_right(directory: Path) -> None:
    """With the verifier's own random numbers it draws the same tokens."""
    sampling = SamplingParams(temperature=1.0, seed=11)
    backend = tiny.make_backend(tiny.load(directory, CONFIG), CONFIG)
    engine = Engine(backend, CONFIG, [small_model(directory)]).start()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    *_, done = engine.generate(sequence, 30, sampling)
    engine.shutdown()
    assert isinstance(done, DoneEvent)
    assert done.accepted_draft_tokens == done.proposed_draft_tokens > 15


def test_a_small_model_gives_its_slabs_back(directory: Path, other: Path) -> None:
    proposer = small_model(other)
    engine = Engine(tiny.make_backend(tiny.load(directory, CONFIG), CONFIG), CONFIG, [proposer]).start()
    pool = proposer._backend.pool
    for _ in range(2 * CONFIG.capacity):
        sequence = engine.open("someone", [])
        say(engine, sequence, PROMPT, 6)
        fork = engine.fork(sequence)
        say(engine, fork, [3], 3)
        imported = engine.import_state(engine.export_state(fork), "someone")
        for each in (sequence, fork, imported):
            engine.close(each)
    engine.shutdown()
    assert pool.free_count == CONFIG.capacity


def test_a_small_model_that_is_asked_twice_says_the_same_twice(directory: Path) -> None:
    """A draft that finds no room in its step is asked for again."""
    proposer = small_model(directory)
    request = DraftRequest(proposer.new_state(), PROMPT, 3)
    (first,) = [guess for guess in (proposer.propose([request])[0] for _ in range(3)) if guess][:1]
    assert proposer.propose([request]) == [first]
    assert len(first) == 3

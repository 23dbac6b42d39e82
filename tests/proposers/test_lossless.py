"""Whatever a proposer guesses, the tokens are those of plain decoding."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from kakeya import kernels as native
from kakeya.config import EngineConfig
from kakeya.engine.cpu.backend import CpuBackend
from kakeya.engine.draft_length import DraftLength
from kakeya.engine.drafting import Drafter
from kakeya.engine.engine import Engine
from kakeya.engine.proposer import DraftRequest, Proposer
from kakeya.models.drafter import DrafterKind, read_drafter
from kakeya.proposers.drafter import TrainedDrafter
from kakeya.proposers.model import ModelState, SmallModel
from kakeya.proposers.ngram import LookUp
from kakeya.types import (
    BackendChoice,
    DoneEvent,
    DType,
    KernelChoice,
    Numerics,
    SamplingParams,
    TokenEvent,
    WeightFormat,
)
from support import tiny
from support.constraints import EOS, Stairs
from support.engines import GREEDY, FunctionProposer, say, tokens_of
from support.proposing import desk, proposing, remote, small_model as roomy_model

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


def short_headed(directory: Path) -> SmallModel:
    """One that guesses the first half of the tokens alone."""
    config = replace(CONFIG, kernels=KernelChoice.NATIVE, weights=WeightFormat.INT8)
    backend = tiny.make_backend(tiny.load(directory, config), config)
    assert isinstance(backend, CpuBackend)
    backend.shorten_head(32)
    return SmallModel(backend, 4, at_once=5)


def trained(directory: Path, kind: DrafterKind, config: EngineConfig = CONFIG) -> TrainedDrafter:
    """As good as a drafter is that was trained on nothing."""
    decoder = tiny.load(directory, config)
    stored = read_drafter(tiny.write_random_drafter(directory / f"{kind}.drafter", decoder.config, kind))
    verifier, kernels = tiny.make_backend(decoder, config), native.load(config.kernels)
    return TrainedDrafter(stored, verifier, decoder.config, config, kernels)


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
    "the model with a short head": lambda directory, other: [short_headed(directory)],
    "a drafter, step by step": lambda directory, other: [trained(directory, "steps")],
    "a drafter, in blocks": lambda directory, other: [trained(directory, "block")],
    "look-up, then a drafter": lambda directory, other: [LookUp(4), trained(directory, "steps")],
    "at random": lambda directory, other: [FunctionProposer(at_random)],
    "raising": lambda directory, other: [LookUp(4), FunctionProposer(raising)],
}
# Elsewhere: the addresses of what is served there. What arrives in time is drafted.
REMOTE: dict[str, Make] = {
    "remote": lambda directory, other: [LookUp(4), roomy_model(directory, CONFIG)],
    "remote drafter": lambda directory, other: [trained(directory, "steps")],
}
AS_IT_PAYS: dict[str, Make] = {
    "look-up, as it pays": lambda directory, other: [LookUp(4)],
    "both, as it pays": lambda directory, other: [LookUp(4), small_model(directory)],
    "a drafter, as it pays": lambda directory, other: [trained(directory, "steps")],
}


@pytest.fixture(scope="module", params=[*ALWAYS, *REMOTE, *AS_IT_PAYS])
def engine(request: pytest.FixtureRequest, directory: Path, other: Path) -> Iterator[Engine]:
    length = DraftLength() if request.param in AS_IT_PAYS else None
    proposers = (ALWAYS | REMOTE | AS_IT_PAYS)[request.param](directory, other)
    backend = tiny.make_backend(tiny.load(directory, CONFIG), CONFIG)
    with ExitStack() as stack:
        if request.param in REMOTE:
            proposers = [stack.enter_context(remote(stack.enter_context(proposing(desk(*proposers)))))]
        engine = Engine(backend, CONFIG, proposers, length=length).start()
        yield engine
        engine.shutdown()


@pytest.fixture(scope="module")
def plain(directory: Path) -> Iterator[Engine]:
    engine = Engine(tiny.make_backend(tiny.load(directory, CONFIG), CONFIG), CONFIG).start()
    yield engine
    engine.shutdown()


def talk(engine: Engine, sampling: SamplingParams) -> list[TokenEvent]:
    """Two turns, past the window."""
    sequence, said = engine.open("someone", []), []
    for message in (PROMPT, [3, 4]):
        engine.append(sequence, message)
        said += [e for e in engine.generate(sequence, 24, sampling) if isinstance(e, TokenEvent)]
    engine.close(sequence)
    return said


@pytest.fixture(scope="module")
def plainly(plain: Engine) -> dict[str, list[TokenEvent]]:
    """What plain decoding says with each sampling: once for all proposers."""
    return {name: talk(plain, sampling) for name, sampling in SAMPLINGS.items()}


@pytest.mark.unwatched
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_tokens_are_those_of_plain_decoding(
    plainly: dict[str, list[TokenEvent]], engine: Engine, sampling: str
) -> None:
    """With their log-probabilities."""
    assert talk(engine, SAMPLINGS[sampling]) == plainly[sampling]


@pytest.mark.unwatched
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_grammar_allows_what_it_allows_in_plain_decoding(
    plain: Engine, engine: Engine, sampling: str
) -> None:
    """A constraint with a state of its own, which drafts run ahead of, and which ends the answer."""

    def talk(engine: Engine) -> list[list[TokenEvent]]:
        sequence, said = engine.open("someone", [EOS]), []
        for message in (PROMPT, [3, 4]):
            engine.append(sequence, message)
            stream = engine.generate(sequence, 40, SAMPLINGS[sampling], constraint=Stairs(20))
            said.append([event for event in stream if isinstance(event, TokenEvent)])
        engine.close(sequence)
        for events in said:
            tokens = [event.token_id for event in events]
            assert (len(tokens), tokens[-1]) == (21, EOS)
            assert Stairs(20).obeyed_by(tokens)
        return said

    assert talk(engine) == talk(plain)


@pytest.mark.unwatched
def test_choices_of_one_prompt_are_alike(plain: Engine, engine: Engine) -> None:
    """Forks that wait for one of them to compute the prompt, which is longer than a slab."""

    def talk(engine: Engine) -> list[list[int]]:
        first = engine.open("someone", [])
        engine.append(first, PROMPT * 4)
        choices = [first, engine.fork(first), engine.fork(first)]
        sampled = [SamplingParams(temperature=1.0, seed=seed) for seed in range(len(choices))]
        streams = [engine.generate(each, 20, how) for each, how in zip(choices, sampled, strict=True)]
        said = [tokens_of(stream) for stream in streams]
        for each in choices:
            engine.close(each)
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


RANKS = 3
UNLIKELY_CHI_SQUARE = 16.3  # with three degrees of freedom it is larger once in a thousand times


@pytest.mark.unwatched
@pytest.mark.parametrize("make", ["the model itself", "at random", "a drafter, step by step"])
def test_in_fast_numerics_the_distribution_is_that_of_the_model(
    directory: Path, other: Path, make: str
) -> None:
    """How often the likeliest token is chosen, the second and the third, is what their probabilities say."""
    config = replace(CONFIG, numerics=Numerics.FAST, cache=replace(CONFIG.cache, window=200))
    backend = tiny.make_backend(tiny.load(directory, config), config)
    engine = Engine(backend, config, ALWAYS[make](directory, other)).start()
    expected, seen, drafted = [0.0] * (RANKS + 1), [0] * (RANKS + 1), 0
    for seed in range(6):
        sequence, sampling = engine.open("someone", []), SamplingParams(1.0, seed=seed, top_logprobs=RANKS)
        engine.append(sequence, PROMPT)
        *tokens, done = engine.generate(sequence, 100, replace(sampling, logprobs=True))
        assert isinstance(done, DoneEvent)
        drafted += done.proposed_draft_tokens
        for event in tokens:
            assert isinstance(event, TokenEvent)
            likeliest = [each.token_id for each in event.top_logprobs]
            chances = [math.exp(each.logprob) for each in event.top_logprobs]
            for rank, chance in enumerate([*chances, 1 - sum(chances)]):
                expected[rank] += chance
            seen[likeliest.index(event.token_id) if event.token_id in likeliest else RANKS] += 1
        engine.close(sequence)
    engine.shutdown()
    assert drafted > 250
    assert sum((s - e) ** 2 / e for s, e in zip(seen, expected, strict=True)) < UNLIKELY_CHI_SQUARE


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


NATIVE = replace(CONFIG, kernels=KernelChoice.NATIVE, dtype=DType.BFLOAT16, weights=WeightFormat.INT8)
MLX = replace(CONFIG, backend=BackendChoice.MLX)


@pytest.mark.unwatched
@pytest.mark.parametrize("kind", ["steps", "block"])
@pytest.mark.parametrize("numerics", Numerics)
@pytest.mark.parametrize("config", [CONFIG, NATIVE, MLX], ids=["torch", "native", "mlx"])
def test_a_drafter_changes_no_token_in_any_numerics(
    directory: Path, config: EngineConfig, numerics: Numerics, kind: DrafterKind
) -> None:
    """Greedy and sampled, past the window, with a shared beginning, cancelled, forked and imported."""
    config = replace(config, numerics=numerics)
    drafter = trained(directory, kind, config)
    said = []
    for proposers in ((), (drafter,)):
        engine = Engine(tiny.make_backend(tiny.load(directory, config), config), config, proposers).start()
        said.append(conversation(engine))
        engine.shutdown()
    assert said[0] == said[1]
    assert drafter.memory.pool.free_count == config.capacity


def conversation(engine: Engine) -> list[list[int]]:
    first, second = engine.open("someone", []), engine.open("someone", [])
    said = [say(engine, each, [*PROMPT, *PROMPT, last], 20) for each, last in ((first, 3), (second, 4))]
    said.append(say(engine, first, [3], 24, SAMPLINGS["seeded"]))
    engine.append(second, [9])
    stream = engine.generate(second, 500, GREEDY)
    taken = [stream.next_event(10) for _ in range(7)]
    stream.cancel()
    kept = [event.token_id for event in [*taken, *stream] if isinstance(event, TokenEvent)]
    said.append(kept[:6])  # one of the seven events tells of dropped tokens
    fork = engine.fork(first)
    imported = engine.import_state(engine.export_state(first), "someone")
    said += [say(engine, each, [8, 8], 12, SAMPLINGS["penalized"]) for each in (first, fork, imported)]
    for each in (first, second, fork, imported):
        engine.close(each)
    return said


@pytest.mark.parametrize("config", [CONFIG, NATIVE, MLX], ids=["torch", "native", "mlx"])
def test_a_drafter_that_is_shown_things_at_times_changes_no_token(
    directory: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where it does not pay: with gaps in what it knows it goes on, forked, imported and taken back."""
    plain = Engine(tiny.make_backend(tiny.load(directory, config), config), config).start()
    expected = conversation(plain)
    plain.shutdown()
    drafter, at_times = trained(directory, "steps", config), random.Random(5)
    monkeypatch.setattr(Drafter, "_is_near", lambda *given: at_times.random() < 0.6)
    monkeypatch.setattr(DraftLength, "counts", lambda self, streams, offers, *rest: [2] * len(offers))
    backend = tiny.make_backend(tiny.load(directory, config), config)
    engine = Engine(backend, config, [drafter], length=DraftLength()).start()
    propose, guesses = drafter.propose, list[Sequence[int]]()
    monkeypatch.setattr(drafter, "propose", lambda asked: guesses.extend(said := propose(asked)) or said)
    assert conversation(engine) == expected
    engine.shutdown()
    assert 0.1 < sum(map(bool, guesses)) / len(guesses) < 0.9, (
        "it guesses where it was shown the newest position"
    )
    assert drafter.memory.pool.free_count == config.capacity


def test_a_drafter_guesses_in_every_step(directory: Path) -> None:
    drafter = trained(directory, "steps")
    backend = tiny.make_backend(tiny.load(directory, CONFIG), CONFIG)
    engine = Engine(backend, CONFIG, [drafter]).start()
    sequence = engine.open("someone", [])
    engine.append(sequence, PROMPT)
    *_, done = engine.generate(sequence, 30, SamplingParams(temperature=1.0, seed=11))
    engine.shutdown()
    assert isinstance(done, DoneEvent)
    assert done.proposed_draft_tokens > 60


def test_a_small_model_forgets_what_it_guessed_wrong(other: Path) -> None:
    """After a wrong guess it says what it says of the same history when it has guessed nothing before."""
    proposer = small_model(other)

    def guesses(state: ModelState, tokens: Sequence[int]) -> Sequence[int]:
        """The first that it has, once it has read all."""
        return next(filter(None, (proposer.propose([DraftRequest(state, tokens, 4)])[0] for _ in range(9))))

    state = proposer.new_state()
    guess = guesses(state, PROMPT)
    history = [*PROMPT, guess[0], (guess[1] + 1) % tiny.VOCAB, (guess[2] + 1) % tiny.VOCAB, 3]
    assert guesses(state, history) == guesses(proposer.new_state(), history)

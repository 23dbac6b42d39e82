"""The whole engine over the CUDA backend on a CPU, against the CPU backend, token for token."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from kakeya.config import EngineConfig
from kakeya.engine.engine import Engine
from kakeya.engine.proposer import Proposer
from kakeya.engine.state import on_device
from kakeya.errors import StepFailed
from kakeya.sessions.state_files import read_state, write_state
from kakeya.types import DoneEvent, Numerics, SamplingParams, StopReason, TokenEvent
from support import families, tiny
from support.engines import GREEDY, FunctionProposer, NothingKept, say, tokens_of
from support.tiny import make_device_backend

CONFIGS = {"llama": None} | families.BOUNDED
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": SamplingParams(temperature=1.0, seed=2**63 + 11),
    "filtered": SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.02, seed=3),
}
PROMPTS = ([5, 9, 22, 13, 7] * 4, [11, 3], [30], [8, 8, 41, 17, 2, 60, 33])

Pair = tuple[Engine, Engine]


@pytest.fixture(scope="module", params=CONFIGS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    if CONFIGS[request.param] is None:
        return tiny.write_llama(directory)
    families.save_random(CONFIGS[request.param], directory)
    return directory


def both_engines(directory: Path, config: EngineConfig) -> Pair:
    reference = tiny.make_engine(tiny.load(directory, config), config)
    return reference, Engine(make_device_backend(directory, config), config).start()


@pytest.fixture(scope="module", params=Numerics)
def engines(request: pytest.FixtureRequest, directory: Path) -> Iterator[Pair]:
    pair = both_engines(directory, tiny.engine_config(numerics=request.param))
    yield pair
    for engine in pair:
        engine.shutdown()


@pytest.fixture
def llama_engines(tiny_llama: Path) -> Iterator[Pair]:
    pair = both_engines(tiny_llama, tiny.engine_config())
    yield pair
    for engine in pair:
        engine.shutdown()


@pytest.fixture
def device_engine(tiny_llama: Path, request: pytest.FixtureRequest) -> Callable[..., Engine]:
    def make(proposer: Proposer | None = None, **changes: object) -> Engine:
        config = tiny.engine_config(**changes)
        proposers = () if proposer is None else (proposer,)
        engine = Engine(make_device_backend(tiny_llama, config), config, proposers).start()
        request.addfinalizer(engine.shutdown)
        return engine

    return make


def converse_together(engine: Engine, samplings: Sequence[SamplingParams]) -> list[list[int]]:
    """Four sessions at once, each with a sampling of its own, two turns each, past the wrap."""
    sequences = [engine.open(f"owner {index}", []) for index in range(len(PROMPTS))]
    said: list[list[int]] = [[] for _ in sequences]
    for turn in range(2):
        streams = []
        for sequence, prompt, sampling in zip(sequences, PROMPTS, samplings, strict=True):
            engine.append(sequence, prompt if turn == 0 else [4, 6])
            streams.append(engine.generate(sequence, 8, sampling))
        for place, stream in enumerate(streams):
            said[place] += tokens_of(stream)
    for sequence in sequences:
        engine.close(sequence)
    return said


@pytest.mark.unwatched
def test_every_family_says_what_the_cpu_says(engines: Pair) -> None:
    reference, device = engines
    said = converse_together(device, [*SAMPLINGS.values(), GREEDY])
    assert said == converse_together(reference, [*SAMPLINGS.values(), GREEDY])
    assert all(len(tokens) == 16 for tokens in said)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_batch_of_one_sampling_says_what_the_cpu_says(
    llama_engines: Pair, sampling: SamplingParams
) -> None:
    reference, device = llama_engines
    assert converse_together(device, [sampling] * 4) == converse_together(reference, [sampling] * 4)


def test_scores_agree_past_the_wrap(engines: Pair) -> None:
    tokens = torch.randint(3, 60, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    reference, device = (engine.score(tokens) for engine in engines)
    assert device.dtype == torch.float32
    assert device.device.type == "cpu"
    assert (reference - device).abs().max() < 1e-3
    assert device.shape == reference.shape


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(repetition_penalty=1.4, presence_penalty=0.5),
        SamplingParams(temperature=1.0, seed=4, logit_bias={7: 3.0, 9: -100.0}),
        SamplingParams(temperature=0.7, seed=9, logprobs=True, top_logprobs=3),
    ],
    ids=["penalties", "bias", "logprobs"],
)
def test_what_needs_the_host_is_sampled_there(llama_engines: Pair, sampling: SamplingParams) -> None:
    """Beside a plain session, so that a step has rows of both kinds."""
    events = []
    for engine in llama_engines:
        plain, asking = engine.open("plain", []), engine.open("asking", [])
        engine.append(plain, [5, 9, 22])
        engine.append(asking, [13, 7, 11, 12])
        first, second = engine.generate(plain, 20, GREEDY), engine.generate(asking, 12, sampling)
        chosen = [event for event in second if isinstance(event, TokenEvent)]
        events.append((tokens_of(first), [event.token_id for event in chosen], chosen))
    (plain, tokens, expected), (device_plain, device_tokens, actual) = events
    assert (device_plain, device_tokens) == (plain, tokens)
    if sampling.logprobs:
        for one, other in zip(actual, expected, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
            assert [each.token_id for each in one.top_logprobs] == [
                each.token_id for each in other.top_logprobs
            ]


def test_drafts_are_verified_and_change_nothing(tiny_llama: Path, llama_engines: Pair) -> None:
    reference, _ = llama_engines
    expected = say(reference, reference.open("someone", []), [5, 9, 22], 30)
    right = FunctionProposer(lambda tokens: expected[len(tokens) - 3 :])
    wrong = FunctionProposer(lambda tokens: [expected[len(tokens) - 3], 0, 0] if len(tokens) < 30 else [0])
    for proposer in (right, wrong):
        for numerics in Numerics:
            config = tiny.engine_config(numerics=numerics)
            engine = Engine(make_device_backend(tiny_llama, config), config, [proposer]).start()
            stream_of = engine.open("someone", [])
            engine.append(stream_of, [5, 9, 22])
            events = list(engine.generate(stream_of, 30, GREEDY))
            engine.shutdown()
            done = events[-1]
            assert isinstance(done, DoneEvent)
            assert [event.token_id for event in events if isinstance(event, TokenEvent)] == expected
            assert done.accepted_draft_tokens > 0
            assert (done.accepted_draft_tokens == done.proposed_draft_tokens) == (proposer is right)


class Watching(FunctionProposer):
    """Sees the outputs of layers, by session and position, and guesses nothing."""

    hidden_layers = (0, 1)

    def __init__(self) -> None:
        super().__init__(lambda tokens: [])
        self.states: list[NothingKept] = []
        self.seen: dict[tuple[int, int, int], torch.Tensor] = {}

    def new_state(self) -> NothingKept:
        self.states.append(NothingKept())
        return self.states[-1]

    def observe(self, state: NothingKept, start: int, hidden: dict[int, torch.Tensor]) -> None:
        for layer, rows in hidden.items():
            for offset, row in enumerate(rows):
                self.seen[self.states.index(state), layer, start + offset] = row.clone()


@pytest.mark.parametrize("numerics", Numerics)
def test_hidden_states_are_shown_in_segment_order(tiny_llama: Path, numerics: Numerics) -> None:
    """One session decodes while another brings its prompt: their rows change places on the device."""
    config = tiny.engine_config(numerics=numerics)
    seen = []
    for backend in (
        tiny.make_backend(tiny.load(tiny_llama, config), config),
        make_device_backend(tiny_llama, config),
    ):
        watching = Watching()
        engine = Engine(backend, config, [watching]).start()
        prompting, decoding = engine.open("prompting", []), engine.open("decoding", [])
        engine.append(decoding, [9] * 3)
        stream = engine.generate(decoding, 40, GREEDY)
        while engine.read(decoding, lambda s: s.slab.written) < 6:
            next(event for event in stream if isinstance(event, TokenEvent))
        say(engine, prompting, [5, 9, 22, 13, 7, 11, 2, 40, 41, 3, 2], 6)
        assert len(tokens_of(stream)) > 0
        engine.shutdown()
        seen.append(watching.seen)
    first, second = seen
    assert len(first) == 2 * (11 + 5 + 3 + 39)
    assert first.keys() == second.keys()
    assert all(torch.allclose(first[key], second[key], atol=1e-4) for key in first)


def test_a_fork_goes_its_own_way(llama_engines: Pair) -> None:
    said = []
    for engine in llama_engines:
        sequence = engine.open("someone", [])
        say(engine, sequence, [5, 9, 22, 13], 15)
        fork = engine.fork(sequence)
        said.append((say(engine, fork, [7], 10), say(engine, sequence, [8], 10), say(engine, fork, [9], 5)))
    assert said[0] == said[1]


def test_sessions_travel_between_backends(llama_engines: Pair, tmp_path: Path) -> None:
    """There and back: a session goes on as if it had stayed."""
    reference, device = llama_engines
    stayed = reference.open("someone", [])
    expected = [say(reference, stayed, message, 9) for message in ([5, 9, 22] * 5, [7], [8, 2])]
    here, there = reference, device
    sequence = here.open("someone", [])
    said = [say(here, sequence, [5, 9, 22] * 5, 9)]
    for message in ([7], [8, 2]):
        write_state(tmp_path / "state", here.export_state(sequence))
        pool = there._backend.pool
        state = on_device(read_state(tmp_path / "state", "tiny", pool.geometry), pool.device)
        here, there = there, here
        sequence = here.import_state(state, "someone")
        said.append(say(here, sequence, message, 9))
    assert said == expected


def test_a_cancelled_generate_keeps_what_was_read(llama_engines: Pair) -> None:
    said = []
    for engine in llama_engines:
        sequence = engine.open("someone", [])
        engine.append(sequence, [5, 9, 22, 13, 7] * 4)
        stream = engine.generate(sequence, 50, GREEDY)
        taken = [next(event for event in stream if isinstance(event, TokenEvent)).token_id for _ in range(7)]
        stream.cancel()
        # Asked first: whoever goes on reading may still take a token before the engine hears of the cancel.
        assert engine.read(sequence, lambda s: s.committed) == 20 + 7
        assert [event.stop_reason for event in stream if isinstance(event, DoneEvent)] == [
            StopReason.CANCELLED
        ]
        said.append((taken, say(engine, sequence, [3], 10)))
    assert said[0] == said[1]


def test_a_row_without_a_finite_logit_fails_its_own_request(device_engine: Callable[..., Engine]) -> None:
    engine = device_engine()
    sound, broken = engine.open("sound", []), engine.open("broken", [])
    expected = say(engine, engine.open("alone", []), [5, 9, 22], 12)
    say(engine, broken, [5, 9], 2)
    engine.read(broken, lambda s: s.slab.storage.fill_(float("nan")))
    engine.append(sound, [5, 9, 22])
    engine.append(broken, [7])
    good, bad = engine.generate(sound, 12, GREEDY), engine.generate(broken, 12, GREEDY)
    with pytest.raises(StepFailed, match="not a finite number"):
        tokens_of(bad)
    assert tokens_of(good) == expected


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(repetition_penalty=1.3)], ids=["plain", "host"])
def test_more_logits_than_the_head_takes_at_once(
    device_engine: Callable[..., Engine], sampling: SamplingParams
) -> None:
    """Scores of a block and drafts go through the head in several calls; the bits are the same."""
    engine = device_engine(numerics=Numerics.EXACT)
    tokens = [5, 9, 22, 13, 7, 11, 2, 40]
    whole, said = engine.score(tokens), say(engine, engine.open("someone", []), tokens, 12, sampling)
    guess = FunctionProposer(lambda history: said[len(history) - 8 :][:2])
    several = device_engine(numerics=Numerics.EXACT, proposer=guess)
    several._backend._head_rows = 2
    assert torch.equal(several.score(tokens), whole)
    assert say(several, several.open("someone", []), tokens, 12, sampling) == said


def test_every_batch_size_gives_the_same_tokens(device_engine: Callable[..., Engine]) -> None:
    """Whatever a batch is padded to: 1 to 7 sessions, joining and leaving at different times."""
    engine = device_engine(capacity=8, max_batch_tokens=64)
    alone = []
    for place, prompt in enumerate(PROMPTS + PROMPTS[:3]):
        sequence = engine.open("alone", [])
        alone.append(say(engine, sequence, prompt, 9 + place))
        engine.close(sequence)
    streams = []
    for place, prompt in enumerate(PROMPTS + PROMPTS[:3]):
        sequence = engine.open(f"owner {place}", [])
        engine.append(sequence, prompt)
        streams.append(engine.generate(sequence, 9 + place, GREEDY))
    assert [tokens_of(stream) for stream in streams] == alone


def test_scoring_between_steps_disturbs_nobody(tiny_llama: Path) -> None:
    """What is scored passes through the same tables as the steps that repeat each other."""
    config = tiny.engine_config(spare=256)  # so that the engine never waits for its reader
    engine = Engine(make_device_backend(tiny_llama, config), config).start()
    sampling = SamplingParams(temperature=20.0, seed=3)  # far from greedy
    alone = say(engine, engine.open("alone", []), PROMPTS[0], 200, sampling)
    sequence = engine.open("watched", [])
    engine.append(sequence, list(PROMPTS[0]))
    stream = engine.generate(sequence, 200, sampling)
    scored = [engine.score(PROMPTS[3])]
    while stream.unread < 200:
        scored.append(engine.score(PROMPTS[3]))
    tokens = tokens_of(stream)
    engine.shutdown()
    assert tokens == alone
    assert all(torch.equal(each, scored[0]) for each in scored)


@pytest.mark.parametrize("tiny_number", [{"top_p": 1e-50}, {"temperature": 1e-40}])
def test_numbers_too_small_for_float32_take_the_best_token(
    tiny_llama: Path, tiny_number: dict[str, float]
) -> None:
    sampling = SamplingParams(**{"temperature": 1.0, "seed": 4} | tiny_number)
    engines = both_engines(tiny_llama, tiny.engine_config())
    said = [say(engine, engine.open("someone", []), PROMPTS[0], 12, sampling) for engine in engines]
    for engine in engines:
        engine.shutdown()
    assert said[0] == said[1]

"""The device backend on a real device: graphs, running ahead, copies beside the stream."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kakeya.config import EngineConfig
from kakeya.engine.cuda.shapes import StepBuckets
from kakeya.engine.engine import Engine
from kakeya.engine.logits import LogProbs
from kakeya.engine.scoring import best_tokens, score_tokens
from kakeya.engine.state import on_device
from kakeya.errors import ConfigError
from kakeya.sessions.state_files import read_state, write_state
from kakeya.types import (
    BackendChoice,
    DType,
    KernelChoice,
    Numerics,
    SamplingParams,
    TokenEvent,
    WeightFormat,
)
from support import tiny
from support.engines import GREEDY, say, tokens_of
from support.tiny import make_device_backend, tiny_runtime

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)
SEEDED = SamplingParams(temperature=0.9, top_k=30, top_p=0.95, seed=12)


def device_config(**changes: object) -> EngineConfig:
    changes = {"kernels": KernelChoice.AUTO, "capacity": 12, "max_batch_tokens": 256, **changes}
    return tiny.engine_config(**changes)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(directory: Path) -> Iterator[Engine]:
    config = device_config(kernels=KernelChoice.TORCH)
    engine = tiny.make_engine(tiny.load(directory, config), config)
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module", params=Numerics)
def engine(request: pytest.FixtureRequest, directory: Path) -> Iterator[Engine]:
    config = device_config(numerics=request.param)
    engine = Engine(make_device_backend(directory, config, DEVICE), config).start()
    yield engine
    engine.shutdown()


def crowd(engine: Engine, sampling: SamplingParams, count: int = 9) -> list[list[int]]:
    sequences = [engine.open(f"owner {place}", []) for place in range(count)]
    streams = []
    for place, sequence in enumerate(sequences):
        engine.append(sequence, [5 + place, 9, 22, 13, 7] * (1 + place % 4))
        streams.append(engine.generate(sequence, 20 + place, sampling))
    said = [tokens_of(stream) for stream in streams]
    for sequence in sequences:
        engine.close(sequence)
    return said


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_crowd_says_what_the_cpu_says(engine: Engine, reference: Engine, sampling: SamplingParams) -> None:
    assert crowd(engine, sampling) == crowd(reference, sampling)


def test_every_bucket_is_captured(directory: Path) -> None:
    for numerics in Numerics:
        config = device_config(numerics=numerics)
        backend = make_device_backend(directory, config, DEVICE)
        assert all(shape in backend._graphs for shape in StepBuckets(config).captured)


def test_capturing_touches_no_slab(directory: Path) -> None:
    fresh = make_device_backend(directory, device_config(), DEVICE)
    assert not fresh.pool.storage.any()


def test_steps_take_no_more_memory(engine: Engine) -> None:
    crowd(engine, GREEDY)
    before = torch.cuda.memory_allocated(DEVICE)
    for _ in range(3):
        crowd(engine, GREEDY)
    assert torch.cuda.memory_allocated(DEVICE) == before


def test_exact_bits_are_the_same_alone_and_in_a_crowd(directory: Path) -> None:
    config = device_config(numerics=Numerics.EXACT, dtype=DType.BFLOAT16, weights=WeightFormat.BF16)
    engine = Engine(make_device_backend(directory, config, DEVICE), config).start()
    alone = []
    for place in range(9):
        sequence = engine.open("alone", [])
        alone.append(say(engine, sequence, [5 + place, 9, 22, 13, 7] * (1 + place % 4), 20 + place, SEEDED))
        engine.close(sequence)
    assert crowd(engine, SEEDED) == alone
    engine.shutdown()


@pytest.mark.parametrize("weights", [WeightFormat.AUTO, WeightFormat.BF16])
def test_bfloat16_stays_close_to_float32(directory: Path, reference: Engine, weights: WeightFormat) -> None:
    config = device_config(dtype=DType.BFLOAT16, weights=weights)
    engine = Engine(make_device_backend(directory, config, DEVICE), config).start()
    tokens = [5, 9, 22, 13, 7, 11, 2, 40] * 6
    difference = (engine.score(tokens).log_softmax(-1) - reference.score(tokens).log_softmax(-1)).abs()
    engine.shutdown()
    assert difference.mean() < 0.1


def test_a_text_is_scored_where_its_logits_are(engine: Engine) -> None:
    tokens = [5, 9, 22, 13, 7, 11, 2, 40] * 30
    logits = engine.score(tokens).numpy()
    speaking = engine.open("speaking", [])
    engine.append(speaking, [5, 9, 22])
    stream = engine.generate(speaking, 200, GREEDY)
    events = [event for some in score_tokens(engine, tokens, 4) for event in some]
    assert len(tokens_of(stream)) == 200
    engine.close(speaking)
    for row, event in zip(map(LogProbs, logits), events[1:], strict=False):
        assert event.logprob == pytest.approx(row.of(event.token_id).logprob, abs=1e-9)
        assert [each.token_id for each in event.top_logprobs] == [each.token_id for each in row.top(4)]


def test_equal_logits_are_listed_by_id() -> None:
    logits = torch.zeros(40, 151_936, device=DEVICE)
    logits[:, ::2] = -0.0
    logits[:, 70_000::9] = 2.0
    assert best_tokens(logits, 4).tolist() == [[70_000, 70_009, 70_018, 70_027]] * 40
    assert best_tokens(logits[:, :70_000], 3).tolist() == [[0, 1, 2]] * 40, "0.0 is no greater than -0.0"


def test_sessions_move_while_others_generate(engine: Engine, reference: Engine, tmp_path: Path) -> None:
    """An export and an import on other threads disturb nobody, and what arrives goes on as it would have."""
    still = engine.open("still", [])
    say(engine, still, [5, 9, 22] * 5, 9)
    busy = [engine.open(f"busy {place}", []) for place in range(4)]
    for place, sequence in enumerate(busy):
        engine.append(sequence, [7 + place, 3])
    streams = [engine.generate(sequence, 60, GREEDY) for sequence in busy]
    pool, arrived = engine._backend.pool, []

    def travel() -> None:
        write_state(tmp_path / "state", engine.export_state(still))
        state = on_device(read_state(tmp_path / "state", "tiny", pool.geometry), pool.device)
        arrived.append(engine.import_state(state, "still"))

    traveller = threading.Thread(target=travel)
    traveller.start()
    said = [tokens_of(stream) for stream in streams]
    traveller.join()
    assert say(engine, arrived[0], [8], 9) == say(engine, still, [8], 9)
    for place, tokens in enumerate(said):
        other = reference.open("alone", [])
        assert say(reference, other, [7 + place, 3], 60) == tokens
        reference.close(other)
    for sequence in (*busy, still, *arrived):
        engine.close(sequence)


def test_penalties_and_logprobs_beside_plain_rows(engine: Engine, reference: Engine) -> None:
    asking = SamplingParams(repetition_penalty=1.3, logprobs=True, top_logprobs=2)
    said = []
    for each in (engine, reference):
        plain, other = each.open("plain", []), each.open("asking", [])
        each.append(plain, [5, 9, 22])
        each.append(other, [13, 7])
        first, second = each.generate(plain, 30, GREEDY), each.generate(other, 10, asking)
        chosen = [event for event in second if isinstance(event, TokenEvent)]
        said.append((tokens_of(first), [event.token_id for event in chosen]))
        for sequence in (plain, other):
            each.close(sequence)
    assert said[0] == said[1]


def test_the_runtime_takes_the_device_by_itself(directory: Path) -> None:
    config = device_config(backend=BackendChoice.AUTO, threads=1)
    with tiny_runtime(directory, config) as runtime:
        facts = runtime.describe()
        assert facts.backend == "cuda"
        assert torch.cuda.get_device_name(DEVICE) in facts.kernels
        session = runtime.create_session(eos_token_ids=())
        runtime.append(session, [5, 9])
        assert len(tokens_of(runtime.generate(session, 9))) == 9


def test_too_many_sessions_are_refused_at_the_start(directory: Path) -> None:
    config = device_config(window=2**20, backend=BackendChoice.CUDA, capacity=2**20)
    words = "the KV pool does not fit on the device: 1,048,576 slabs x"
    with pytest.raises(ConfigError, match=words), tiny_runtime(directory, config):
        raise AssertionError("it must not open")


# In a process of its own, which has no device afterwards.
LOSING = """
from pathlib import Path

import torch

from kakeya.engine.device import is_lost
from kakeya.engine.engine import Engine
from kakeya.errors import Unavailable
from support import tiny
from support.engines import say
from support.tiny import make_device_backend

device, config = torch.device("cuda", 0), tiny.engine_config()
engine = Engine(make_device_backend(Path({directory!r}), config, device), config).start()
say(engine, engine.open("someone", []), [5, 9], 3)
try:
    torch.empty(2**50, device=device)
except torch.OutOfMemoryError:
    print(is_lost(device))
torch.zeros(4, device=device)[torch.tensor([10**6], device=device)]
try:
    say(engine, engine.open("someone", []), [5, 9], 3)
except Unavailable as error:
    print(error)
print(engine.ended.result(60))
engine.shutdown()
"""


def test_a_fault_in_a_kernel_ends_the_engine_and_running_out_of_memory_does_not(directory: Path) -> None:
    program, tests = LOSING.format(directory=str(directory)), Path(__file__).parents[2]
    command = [sys.executable, "-c", program]
    outcome = subprocess.run(command, cwd=tests, capture_output=True, text=True, timeout=120)
    survived, told, reason = outcome.stdout.splitlines()
    assert survived == "False", outcome.stderr
    assert told == reason
    assert reason.startswith("the engine died: the device failed: ")

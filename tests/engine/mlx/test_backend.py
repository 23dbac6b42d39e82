"""MLX's backend: one evaluation a step, compiled or not, and sessions that move to others and back."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest
import torch

from kakeya.engine.engine import Engine
from kakeya.engine.mlx.backend import MlxBackend, check_mlx, device_name
from kakeya.engine.sampler import SampleRequest
from kakeya.errors import ConfigError
from kakeya.sessions.state_files import read_state, write_state
from kakeya.types import BackendChoice, DType, KernelChoice, Numerics, WeightFormat
from support import families, tiny
from support.engines import GREEDY, FunctionProposer, say, tokens_of
from support.reference import Oracle

CONFIG = tiny.engine_config(backend=BackendChoice.MLX)
PROMPT = [5, 9, 22, 13, 7]


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[Engine]:
    engine = tiny.make_engine(tiny.load(tiny_llama, CONFIG), CONFIG)
    yield engine
    engine.shutdown()


@pytest.fixture
def compiling() -> Iterator[None]:
    mx.enable_compile()
    yield
    mx.disable_compile()


@pytest.mark.slow
def test_compiled_steps_say_what_the_oracle_says(tiny_llama: Path, oracle: Oracle, compiling: None) -> None:
    """Several sessions, prompts past the wrap and drafts: every kind of shape."""
    backend = tiny.make_backend(tiny.load(tiny_llama, CONFIG), CONFIG)
    assert isinstance(backend, MlxBackend)
    wrong = FunctionProposer(lambda tokens: [(tokens[-1] + 1) % tiny.VOCAB] * 3)
    engine = Engine(backend, CONFIG, [wrong]).start()
    try:
        sequences = [engine.open("someone", []) for _ in range(3)]
        prompts = [PROMPT * (place + 1) + [place] for place in range(3)]
        for sequence, prompt in zip(sequences, prompts, strict=True):
            engine.append(sequence, prompt)
        streams = [engine.generate(sequence, 20, GREEDY) for sequence in sequences]
        said = [tokens_of(stream) for stream in streams]
    finally:
        engine.shutdown()
    assert said == [oracle.greedy(prompt, 20, 2, 8) for prompt in prompts]
    assert len(backend._decoder._compiled) > 3


def test_a_step_is_evaluated_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts beside streams are two groups of rows, and still one evaluation."""
    evaluated: list[int] = []
    real = mx.eval
    streaming, waiting = engine.open("someone", []), engine.open("someone", [])
    say(engine, streaming, PROMPT, 1)
    engine.append(waiting, PROMPT * 3)
    steps: list[int] = []
    computed = engine._backend.run  # type: ignore[attr-defined]
    monkeypatch.setattr(mx, "eval", lambda *what: (evaluated.append(1), real(*what)))
    monkeypatch.setattr(
        engine._backend, "run", lambda *given: (steps.append(len(given[0])), computed(*given))[1]
    )
    streams = [engine.generate(sequence, 6, GREEDY) for sequence in (streaming, waiting)]
    assert [len(tokens_of(stream)) for stream in streams] == [6, 6]
    assert max(steps) == 2
    assert len(evaluated) == len(steps)


def test_sessions_move_between_backends_and_back(tiny_llama: Path, oracle: Oracle, tmp_path: Path) -> None:
    on_cpu = replace(CONFIG, backend=BackendChoice.CPU)
    device = tiny.make_device_backend(tiny_llama, replace(CONFIG, kernels=KernelChoice.TORCH))
    engines = [
        tiny.make_engine(tiny.load(tiny_llama, CONFIG), CONFIG),
        tiny.make_engine(tiny.load(tiny_llama, on_cpu), on_cpu),
        Engine(device, CONFIG).start(),
    ]
    history, path = list(PROMPT * 3), tmp_path / "state"
    try:
        sequence, held_by = engines[0].open("someone", []), engines[0]
        history += say(held_by, sequence, history, 4)
        for engine in (engines[1], engines[0], engines[2], engines[0]):
            write_state(path, held_by.export_state(sequence))
            geometry = engine._backend.pool.geometry
            sequence, held_by = engine.import_state(read_state(path, "tiny", geometry), "someone"), engine
            answer = say(held_by, sequence, [4, 6], 5)
            assert answer == oracle.greedy([*history, 4, 6], 5, 2, 8)
            history += [4, 6, *answer]
    finally:
        for engine in engines:
            engine.shutdown()


def test_the_pool_and_what_mlx_reads_are_the_same_memory(tiny_llama: Path) -> None:
    config = replace(CONFIG, dtype=DType.BFLOAT16, weights=WeightFormat.BF16)
    pool = tiny.make_backend(tiny.load(tiny_llama, config), config).pool
    slab = pool.allocate()
    slab.storage.fill_(2.0)
    assert pool.array[slab.index].view(mx.bfloat16).min().item() == 2.0
    assert pool.array.nbytes == pool.storage.nbytes == config.capacity * pool.geometry.slab_bytes


def test_a_pool_beyond_one_buffer_is_refused(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tiny.load(tiny_llama, CONFIG)
    monkeypatch.setattr(mx, "device_info", lambda: {"max_buffer_length": 4000})
    with pytest.raises(
        ConfigError, match="does not fit in one buffer of MLX: 4 slabs .* 4,000 bytes are allowed"
    ):
        tiny.make_backend(weights, CONFIG)


@torch.inference_mode()
def test_a_drafter_shares_the_table_and_the_head(tiny_llama: Path) -> None:
    on_cpu = replace(CONFIG, backend=BackendChoice.CPU)
    here, there = (tiny.make_backend(tiny.load(tiny_llama, each), each) for each in (CONFIG, on_cpu))
    ids = torch.tensor([3, 1, 4])
    assert torch.allclose(here.embed(ids), there.embed(ids))
    rows = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(here.logits(rows), there.logits(rows), atol=1e-4)
    greedy = [SampleRequest(GREEDY, 0)] * 3
    assert here.choose(here.logits(rows), greedy) == there.choose(there.logits(rows), greedy)


def test_gemma_with_a_nested_configuration(tmp_path: Path) -> None:
    """Softcaps, local layers and a `text_config`, through files as they come."""
    import transformers

    text = families.BOUNDED["gemma3"]
    families.save_random(text, tmp_path)
    nested = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    import json

    flat = json.loads((tmp_path / "config.json").read_text())
    assert isinstance(text, transformers.Gemma3TextConfig)
    (tmp_path / "config.json").write_text(json.dumps(nested | {"text_config": flat}))
    said = []
    for backend in (BackendChoice.CPU, BackendChoice.MLX):
        config = replace(CONFIG, backend=backend)
        engine = tiny.make_engine(tiny.load(tmp_path, config), config)
        try:
            said.append(say(engine, engine.open("someone", []), PROMPT * 5, 12))
        finally:
            engine.shutdown()
    assert said[0] == said[1]


def test_exact_numerics_are_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    check_mlx(Numerics.EXACT)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    check_mlx(Numerics.FAST)
    with pytest.raises(
        ConfigError, match="exact is not available on MLX's GPU, which chooses kernels by shape"
    ):
        check_mlx(Numerics.EXACT)
    assert "GPU" in device_name()


def test_a_backend_of_its_own_kind_is_asked_for_nothing_else(engine: Engine) -> None:
    backend = engine._backend
    assert not backend.is_lost()
    with pytest.raises(AssertionError, match="no drafter"):
        backend.launch_drafting([], [], 1)
    with pytest.raises(AssertionError, match="does not run ahead"):
        backend.follow(None)  # type: ignore[arg-type]

"""Bits: what may and what may not change them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import mlx.core as mx
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kakeya.config import EngineConfig
from kakeya.engine.backend import Backend, StepOutput
from kakeya.engine.batch import Segment
from kakeya.engine.engine import Engine
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.stream import EventStream
from kakeya.sessions.state_files import read_state, write_state
from kakeya.types import BackendChoice, DType, KernelChoice, Numerics, SamplingParams, WeightFormat
from support import tiny
from support.engines import GREEDY, Extended, say, tokens_of


class Recording(Extended):
    """The real backend, remembering every logits row by slab and position."""

    def __init__(self, source: Backend) -> None:
        super().__init__(source)
        self.seen: dict[tuple[int, int], Tensor] = {}

    def run(self, segments: Sequence[Segment], hidden_layers: Sequence[int] = ()) -> StepOutput:
        output = super().run(segments, hidden_layers)
        rows = iter(output.logits)
        for segment in segments:
            for position in range(segment.end - segment.logit_rows, segment.end):
                self.seen[segment.sequence.slab.index, position] = next(rows).clone()
        return output


class Bench:
    """One engine whose logits can be read back."""

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        self.backend = Recording(tiny.make_backend(tiny.load(directory, config), config))
        self.engine = Engine(self.backend, config).start()

    def logits(self, sequence: TokenSequence) -> dict[int, Tensor]:
        return {p: row for (slab, p), row in self.backend.seen.items() if slab == sequence.slab.index}


# Not on MLX's GPU, where `exact` is refused.
EXACT_ON_MLX = [
    tiny.engine_config(numerics=Numerics.EXACT, backend=BackendChoice.MLX, **precision)
    for precision in ({}, {"dtype": DType.BFLOAT16, "weights": WeightFormat.INT4})
    if mx.default_device().type == mx.DeviceType.cpu
]
EXACT = [
    tiny.engine_config(numerics=Numerics.EXACT),
    tiny.engine_config(numerics=Numerics.EXACT, dtype=DType.BFLOAT16, weights=WeightFormat.BF16),
    tiny.engine_config(numerics=Numerics.EXACT, dtype=DType.BFLOAT16, weights=WeightFormat.INT4),
    tiny.engine_config(
        numerics=Numerics.EXACT, dtype=DType.BFLOAT16, weights=WeightFormat.INT4, kernels=KernelChoice.NATIVE
    ),
    tiny.engine_config(
        numerics=Numerics.EXACT, dtype=DType.FLOAT32, weights=WeightFormat.INT8, kernels=KernelChoice.NATIVE
    ),
    *EXACT_ON_MLX,
]
FAST = [
    tiny.engine_config(),
    tiny.engine_config(dtype=DType.BFLOAT16, weights=WeightFormat.INT4),
    tiny.engine_config(dtype=DType.BFLOAT16, weights=WeightFormat.BF16, kernels=KernelChoice.NATIVE),
]


def name(config: EngineConfig) -> str:
    computer = "mlx" if config.backend is BackendChoice.MLX else config.kernels
    return f"{config.dtype}-{config.weights}-{computer}"


def assert_same_bits(first: dict[int, Tensor], second: dict[int, Tensor]) -> None:
    assert first, "nothing to compare"
    assert first.keys() == second.keys()
    for position, row in first.items():
        assert torch.equal(row, second[position]), f"logits differ at position {position}"


token_ids = st.integers(2, tiny.VOCAB - 1)
conversation = st.lists(
    st.tuples(st.lists(token_ids, min_size=1, max_size=24), st.integers(1, 6)), min_size=1, max_size=3
)


@pytest.fixture(scope="module", params=EXACT, ids=name)
def exact(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Bench]:
    bench = Bench(tiny_llama, request.param)
    yield bench
    bench.engine.shutdown()


@pytest.fixture(scope="module", params=[*EXACT, *FAST], ids=lambda c: f"{c.numerics}-{name(c)}")
def any_mode(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[Bench]:
    bench = Bench(tiny_llama, request.param)
    yield bench
    bench.engine.shutdown()


def converse(
    bench: Bench, turns: list[tuple[list[int], int]], sampling: SamplingParams = GREEDY
) -> dict[int, Tensor]:
    """Alone, one append a turn."""
    bench.backend.seen.clear()
    sequence = bench.engine.open("alone", [])
    for message, count in turns:
        say(bench.engine, sequence, message, count, sampling)
    bench.engine.close(sequence)
    return bench.logits(sequence)


@pytest.mark.unwatched
@settings(max_examples=8)
@given(turns=conversation, others=st.lists(conversation, min_size=1, max_size=3), seed=st.integers(0, 99))
@pytest.mark.slow
def test_exact_bits_do_not_depend_on_the_company(
    exact: Bench, turns: list[tuple[list[int], int]], others: list[list[tuple[list[int], int]]], seed: int
) -> None:
    sampling = SamplingParams(temperature=1.0, seed=seed)
    alone = converse(exact, turns, sampling)
    exact.backend.seen.clear()
    engine = exact.engine
    crowd = [engine.open(f"owner {i}", []) for i in range(len(others))]
    sequence = engine.open("among others", [])
    streams = []
    for member, talk in zip(crowd, others, strict=True):
        engine.append(member, [token for message, _ in talk for token in message])
        streams.append(engine.generate(member, sum(count for _, count in talk) + 8, sampling))
    for message, count in turns:
        say(engine, sequence, message, count, sampling)
    for stream in streams:
        tokens_of(stream)
    together = exact.logits(sequence)
    for member in (*crowd, sequence):
        engine.close(member)
    assert_same_bits(alone, together)


@pytest.mark.parametrize("block", [128, 64, 32, 16])
@pytest.mark.parametrize("numerics", Numerics)
def test_tokens_are_the_same_beside_others_in_blocks_of_any_size(
    tiny_llama: Path, numerics: Numerics, block: int
) -> None:
    config = tiny.engine_config(2, 200, numerics=numerics, prefill_block=block, max_batch_tokens=256)
    engine = Bench(tiny_llama, config).engine
    prompts = [[(7 * i + i * i + seed) % 59 + 2 for i in range(150)] for seed in range(3)]

    def started(prompt: Sequence[int]) -> EventStream:
        sequence = engine.open("someone", [])
        engine.append(sequence, prompt)
        return engine.generate(sequence, 20, GREEDY)

    streams = [started(prompt) for prompt in prompts]
    together = [tokens_of(stream) for stream in streams]
    engine.shutdown()
    engine = Bench(tiny_llama, config).engine
    assert [tokens_of(started(prompt)) for prompt in prompts] == together
    engine.shutdown()


@pytest.mark.unwatched
@settings(max_examples=8)
@given(turns=conversation, data=st.data())
def test_cutting_into_appends_never_changes_a_bit(
    any_mode: Bench, turns: list[tuple[list[int], int]], data: st.DataObject
) -> None:
    whole = converse(any_mode, turns)
    any_mode.backend.seen.clear()
    sequence = any_mode.engine.open("piecewise", [])
    for message, count in turns:
        rest = message
        while rest:
            cut = data.draw(st.integers(1, len(rest)))
            any_mode.engine.append(sequence, rest[:cut])
            rest = rest[cut:]
        say(any_mode.engine, sequence, [], count)
    any_mode.engine.close(sequence)
    assert_same_bits(whole, any_mode.logits(sequence))


def test_exact_bits_survive_export_and_import(exact: Bench, tmp_path: Path) -> None:
    first = ([7, 3, 9, 4] * 6, 5)
    then = ([11, 12, 13], 6)
    whole = converse(exact, [first, then])
    engine, pool = exact.engine, exact.backend.pool
    exact.backend.seen.clear()
    sequence = engine.open("traveller", [])
    say(engine, sequence, *first)
    before = exact.logits(sequence)
    write_state(tmp_path / "state", engine.export_state(sequence))
    engine.close(sequence)
    # Someone else scribbles over the slab in between.
    converse(exact, [([20] * 30, 3)])
    state = read_state(tmp_path / "state", exact.backend.fingerprint, pool.geometry)
    exact.backend.seen.clear()
    restored = engine.import_state(state, "traveller")
    say(engine, restored, *then)
    engine.close(restored)
    assert_same_bits(whole, before | exact.logits(restored))


def test_exact_mode_is_not_vacuous(tiny_llama: Path) -> None:
    """Another history gives other bits, so the comparisons above can fail."""
    bench = Bench(tiny_llama, EXACT[0])
    first, second = converse(bench, [([5, 6, 7], 1)]), converse(bench, [([5, 6, 8], 1)])
    bench.engine.shutdown()
    with pytest.raises(AssertionError, match="logits differ"):
        assert_same_bits(first, second)

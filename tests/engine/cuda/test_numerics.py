"""Exact numerics on the device backend: a row's bits depend on its own history alone."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kakeya.engine.backend import LaunchedStep
from kakeya.engine.batch import Segment
from kakeya.engine.cuda.shapes import StepShape
from kakeya.engine.engine import Engine
from kakeya.engine.sampler import SampleRequest
from kakeya.engine.sequence import TokenSequence
from kakeya.sessions.state_files import read_state, write_state
from kakeya.types import DType, Numerics, SamplingParams, WeightFormat
from support import families, tiny
from support.engines import GREEDY, say, tokens_of
from support.tiny import make_device_backend

FLOAT32 = tiny.engine_config(numerics=Numerics.EXACT)
BFLOAT16 = tiny.engine_config(numerics=Numerics.EXACT, dtype=DType.BFLOAT16, weights=WeightFormat.BF16)
GEMMA = transformers.Gemma2Config(
    **families.SHAPE | {"head_dim": 16, "num_hidden_layers": 2}, sliding_window=5, query_pre_attn_scalar=24
)

Talk = list[tuple[list[int], int]]


class Bench:
    """An engine over the device backend whose logits are remembered by slab and position."""

    def __init__(self, directory: Path, config: object) -> None:
        self.seen: dict[tuple[int, int], Tensor] = {}
        self.backend = make_device_backend(directory, config)
        self._launch, self._follow = self.backend.launch, self.backend.follow
        self._sample = self.backend._decoder.sample
        self._rows: list[Tensor] = []
        self._places: list[tuple[int, int]] = []
        self.backend.launch, self.backend.follow = self.launch, self.follow
        self.backend._decoder.sample = self.sample
        self.engine = Engine(self.backend, config).start()

    def sample(self, shape: StepShape, logits: Tensor, first: int = 0) -> None:
        self._rows += logits.clone()
        self._sample(shape, logits, first)

    def launch(
        self,
        segments: Sequence[Segment],
        requests: Sequence[SampleRequest],
        hidden_layers: Sequence[int] = (),
    ) -> LaunchedStep:
        self._places = [
            (segment.sequence.slab.index, position)
            for segment in segments
            for position in range(segment.end - segment.logit_rows, segment.end)
        ]
        return self._watched(lambda: self._launch(segments, requests, hidden_layers))

    def follow(self, step: LaunchedStep) -> LaunchedStep:
        self._places = [(slab, position + 1) for slab, position in self._places]
        return self._watched(lambda: self._follow(step))

    def _watched(self, launch: Callable[[], LaunchedStep]) -> LaunchedStep:
        self._rows = []
        launched = launch()
        self.seen |= zip(self._places, self._rows, strict=False)  # what is behind them is padding
        return launched

    def logits(self, sequence: TokenSequence) -> dict[int, Tensor]:
        return {p: row for (slab, p), row in self.seen.items() if slab == sequence.slab.index}

    def converse(self, talk: Talk, sampling: SamplingParams = GREEDY) -> dict[int, Tensor]:
        """Alone, one append a turn."""
        self.seen.clear()
        sequence = self.engine.open("alone", [])
        for message, count in talk:
            say(self.engine, sequence, message, count, sampling)
        self.engine.close(sequence)
        return self.logits(sequence)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "gemma2"])
def exact(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    directory = tiny_llama
    if request.param == "gemma2":
        directory = tmp_path_factory.mktemp("gemma2")
        families.save_random(GEMMA, directory)
    bench = Bench(directory, BFLOAT16 if request.param == "bfloat16" else FLOAT32)
    yield bench
    bench.engine.shutdown()


def assert_same_bits(first: dict[int, Tensor], second: dict[int, Tensor]) -> None:
    """Of the rows that both computed: who runs ahead computes a row more than is kept."""
    shared = first.keys() & second.keys()
    assert len(shared) >= max(len(first), len(second)) - 3
    for position in shared:
        assert torch.equal(first[position], second[position]), f"logits differ at position {position}"


token_ids = st.integers(2, 60)
conversation = st.lists(
    st.tuples(st.lists(token_ids, min_size=1, max_size=24), st.integers(1, 6)), min_size=1, max_size=3
)


@settings(max_examples=6)
@given(talk=conversation, others=st.lists(conversation, min_size=1, max_size=3), seed=st.integers(0, 99))
def test_bits_do_not_depend_on_the_company(exact: Bench, talk: Talk, others: list[Talk], seed: int) -> None:
    sampling = SamplingParams(temperature=1.0, seed=seed)
    alone = exact.converse(talk, sampling)
    exact.seen.clear()
    engine = exact.engine
    crowd = [engine.open(f"owner {i}", []) for i in range(len(others))]
    sequence = engine.open("among others", [])
    streams = []
    for member, words in zip(crowd, others, strict=True):
        engine.append(member, [token for message, _ in words for token in message])
        streams.append(engine.generate(member, sum(count for _, count in words) + 8, sampling))
    for message, count in talk:
        say(engine, sequence, message, count, sampling)
    for stream in streams:
        tokens_of(stream)
    together = exact.logits(sequence)
    for member in (*crowd, sequence):
        engine.close(member)
    assert_same_bits(alone, together)


@settings(max_examples=6)
@given(talk=conversation, data=st.data())
def test_bits_do_not_depend_on_the_cutting(exact: Bench, talk: Talk, data: st.DataObject) -> None:
    """Into appends, and into turns: a token generated and the same token appended leave the same bits."""
    whole = exact.converse(talk)
    exact.seen.clear()
    sequence = exact.engine.open("piecewise", [])
    for message, count in talk:
        rest = message
        while rest:
            cut = data.draw(st.integers(1, len(rest)))
            exact.engine.append(sequence, rest[:cut])
            rest = rest[cut:]
        say(exact.engine, sequence, [], count)
    history = exact.engine.read(sequence, lambda s: s.tokens.tolist())
    exact.engine.close(sequence)
    assert_same_bits(whole, exact.logits(sequence))
    exact.seen.clear()
    again = exact.engine.open("as one prompt", [])
    say(exact.engine, again, history[:-1], 1)
    exact.engine.close(again)
    (last,) = exact.logits(again).values()
    assert torch.equal(last, whole[len(history) - 2])


def test_bits_survive_export_and_import(exact: Bench, tmp_path: Path) -> None:
    first, then = ([7, 3, 9, 4] * 6, 5), ([11, 12, 13], 6)
    whole = exact.converse([first, then])
    engine = exact.engine
    exact.seen.clear()
    sequence = engine.open("traveller", [])
    say(engine, sequence, *first)
    before = exact.logits(sequence)
    write_state(tmp_path / "state", engine.export_state(sequence))
    engine.close(sequence)
    exact.converse([([20] * 30, 3)])  # someone else scribbles over the slab in between
    state = read_state(tmp_path / "state", "tiny", exact.backend.pool.geometry)
    exact.seen.clear()
    restored = engine.import_state(state, "traveller")
    say(engine, restored, *then)
    engine.close(restored)
    assert_same_bits(whole, before | exact.logits(restored))


def test_the_comparisons_can_fail(exact: Bench) -> None:
    first, second = exact.converse([([5, 6, 7], 1)]), exact.converse([([5, 6, 8], 1)])
    with pytest.raises(AssertionError, match="logits differ"):
        assert_same_bits(first, second)

"""All layers in one native call: the very bits of the operations called one by one, for every family."""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kakeya.config import EngineConfig
from kakeya.engine.batch import Segment
from kakeya.engine.cpu.backend import CpuBackend
from kakeya.engine.sequence import TokenSequence
from kakeya.models.decoder import Decoder
from kakeya.types import DType, KernelChoice, WeightFormat
from support import families, gguf_files, tiny

pytestmark = pytest.mark.usefixtures("one_torch_thread")

# Products by integers want whole groups of 32 columns, attention heads of 16.
INNER = {"intermediate_size": 64}
TWO_HEADS = families.SHAPE | INNER | {"num_attention_heads": 2}
FUSED = {
    name: copy.deepcopy(config)
    for name, config in families.BOUNDED.items()
    if name not in ("ministral3", "qwen2")
}
FUSED |= {
    "llama-biased": transformers.LlamaConfig(**TWO_HEADS, attention_bias=True, mlp_bias=True),
    "qwen2": transformers.Qwen2Config(**TWO_HEADS),
}
for each in FUSED.values():
    each.intermediate_size = 64
LOOSE = {
    "mixed heads": transformers.Gemma4TextConfig(
        **families.GEMMA4 | INNER, num_global_key_value_heads=1, attention_k_eq_v=True
    ),
    "query temperature": families.BOUNDED["ministral3"],
    "small heads": transformers.LlamaConfig(**families.SHAPE | INNER),
    "a matrix of floats": transformers.LlamaConfig(**TWO_HEADS | {"intermediate_size": 48}),
}
CONFIGS = {
    "int4": tiny.engine_config(kernels=KernelChoice.NATIVE, weights=WeightFormat.INT4),
    "int8 over bf16 slabs": tiny.engine_config(
        kernels=KernelChoice.NATIVE, weights=WeightFormat.INT8, dtype=DType.BFLOAT16
    ),
}


class Stepper:
    """A backend whose sessions are moved on by hand."""

    def __init__(self, decoder: Decoder, config: EngineConfig) -> None:
        self.backend: CpuBackend = tiny.make_backend(decoder, config)
        self.backend.pool.storage.zero_()
        self.sequences = [TokenSequence(self.backend.pool.allocate(), "me", [], None) for _ in range(3)]

    @torch.inference_mode()
    def step(self, rows: Sequence[tuple[int, Sequence[int]]], hidden_layers: Sequence[int] = ()) -> Tensor:
        """The logits of all rows, given as (session, tokens)."""
        segments = []
        for index, tokens in rows:
            sequence = self.sequences[index]
            start = sequence.slab.reserve(len(tokens))
            segments.append(Segment(sequence, start, tokens, 0, len(tokens)))
        output = self.backend.run(segments, hidden_layers)
        for segment in segments:
            segment.sequence.slab.commit(segment.end)
        self.hidden = output.hidden
        return output.logits.clone()


def apart(decoder: Decoder) -> Decoder:
    """The same decoder, its operations called one by one."""
    other = copy.copy(decoder)
    other.fused = None
    return other


def steps_of(seed: int, vocab: int) -> list[list[tuple[int, list[int]]]]:
    """Twelve steps of up to three sessions, blocks and single tokens mixed; one of them wraps at last."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    steps = []
    for _ in range(12):
        sessions = torch.randperm(3, generator=generator)[: draw(1, 4)].tolist()
        lengths = [draw(1, 9) if draw(0, 2) else 1 for _ in sessions]
        steps.append(
            [
                (index, [draw(3, vocab) for _ in range(length)])
                for index, length in zip(sessions, lengths, strict=True)
            ]
        )
    wrapping = [(0, [draw(3, vocab) for _ in range(8)])]
    return [*steps, wrapping, [*wrapping, (1, [draw(3, vocab)])]]


def check_same_bits(decoder: Decoder, config: EngineConfig, seed: int) -> None:
    assert decoder.fused is not None
    together, one_by_one = Stepper(decoder, config), Stepper(apart(decoder), config)
    for step in steps_of(seed, decoder.config.vocab_size):
        assert torch.equal(together.step(step), one_by_one.step(step))
    assert torch.equal(together.backend.pool.storage, one_by_one.backend.pool.storage)
    assert together.sequences[0].slab.written > config.cache.slots


@pytest.fixture(scope="module", params=FUSED)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    families.save_random(FUSED[request.param], directory)
    return directory


@pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))
def test_every_family_has_the_bits_of_its_operations(checkpoint: Path, config: EngineConfig) -> None:
    decoder = tiny.load(checkpoint, config)
    for seed in range(3):
        check_same_bits(decoder, config, seed)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A file with a matrix of every block format, and several in each stack of projections."""
    folder = tmp_path_factory.mktemp("mixed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KAKEYA_CACHE_DIR", str(folder / "cache"))
        return tiny.load(gguf_files.write_mixed(folder / "mixed.gguf"), MIXED)


MIXED = tiny.engine_config(kernels=KernelChoice.NATIVE, weights=WeightFormat.AUTO)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**31))
def test_every_format_has_the_bits_of_its_operations(mixed: Decoder, seed: int) -> None:
    check_same_bits(mixed, MIXED, seed)


@pytest.mark.parametrize("layers", [[0], [1], [0, 1]], ids=str)
def test_tapped_hidden_states_are_those_between_the_operations(mixed: Decoder, layers: list[int]) -> None:
    tapped, one_by_one, plain = (Stepper(each, MIXED) for each in (mixed, apart(mixed), mixed))
    for step in steps_of(1, 71):
        logits = tapped.step(step, layers)
        assert torch.equal(logits, one_by_one.step(step, layers))
        assert torch.equal(logits, plain.step(step))
        assert list(tapped.hidden) == layers
        assert all(torch.equal(tapped.hidden[layer], one_by_one.hidden[layer]) for layer in layers)
    assert torch.equal(tapped.backend.pool.storage, plain.backend.pool.storage)


@pytest.mark.parametrize("name", LOOSE)
def test_what_no_native_call_computes_in_whole(name: str, tmp_path: Path) -> None:
    families.save_random(LOOSE[name], tmp_path)
    decoder = tiny.load(tmp_path, CONFIGS["int4"])
    assert decoder.fused is None
    assert "int4" in decoder.describe_weights()


def test_torch_fuses_nothing(tiny_model: Path) -> None:
    assert tiny.load(tiny_model, tiny.engine_config()).fused is None


def test_layers_that_torch_attends_are_called_one_by_one(mixed: Decoder) -> None:
    """Of a decoder that was loaded with kernels, on a backend that was given none."""
    config = tiny.engine_config(weights=WeightFormat.AUTO)
    native, plain = Stepper(mixed, MIXED), Stepper(mixed, config)
    step = [(0, [5, 9, 22]), (1, [7])]
    assert torch.allclose(native.step(step), plain.step(step), atol=0.2)

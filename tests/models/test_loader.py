"""Weight formats, and the default model."""

import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind

from kakeya import kernels as native
from kakeya.errors import CorruptCheckpoint
from kakeya.models.blocks import BlockFormat, BlockTensor
from kakeya.models.checkpoint import open_checkpoint
from kakeya.models.decoder import Decoder
from kakeya.models.loader import load_decoder
from kakeya.types import DType, KernelChoice, Numerics, WeightFormat
from support import gguf_files, tiny
from support.families import decoder_logits

TOKENS = torch.randint(0, tiny.VOCAB, (24,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_llama(tmp_path_factory.mktemp("llama"))


def load(
    path: Path,
    weights: WeightFormat = WeightFormat.AUTO,
    dtype: DType = DType.FLOAT32,
    numerics: Numerics = Numerics.FAST,
    kernels: KernelChoice = KernelChoice.TORCH,
) -> Decoder:
    library = native.load(kernels)
    return load_decoder(
        open_checkpoint(path), dtype=dtype, weights=weights, numerics=numerics, kernels=library
    )


F32, BF16 = DType.FLOAT32, DType.BFLOAT16


@pytest.mark.parametrize(
    "weights, dtype, kernels, described",
    [
        ("auto", F32, "torch", "float32 (layers), float32 (head)"),
        ("native", BF16, "torch", "bf16 (layers), bf16 (head)"),
        ("float32", BF16, "torch", "float32 (layers), float32 (head)"),
        ("bf16", F32, "native", "bf16 held as float32 (layers), bf16 held as float32 (head)"),
        ("int8", BF16, "torch", "int8 held as bf16 (layers), int8 held as bf16 (head)"),
        ("int8", BF16, "native", "int8 (layers), int8 (head)"),
        ("int4", BF16, "native", "int4 (layers), int4 (head)"),
        ("int4", BF16, "torch", "int4, bf16 for many rows (layers), int4 held as bf16 (head)"),
    ],
)
def test_formats_of_a_float_checkpoint(
    weights: str, dtype: DType, kernels: str, described: str, directory: Path
) -> None:
    decoder = load(directory, WeightFormat(weights), dtype, kernels=KernelChoice(kernels))
    assert decoder.describe_weights() == described
    reference = decoder_logits(load(directory), TOKENS)
    error = (decoder_logits(decoder, TOKENS) - reference).abs().mean() / reference.abs().mean()
    assert error < (0.3 if weights == "int4" else 0.03)


def test_rows_that_are_not_whole_groups_stay_float(tmp_path: Path) -> None:
    path = tiny.write_llama(tmp_path, hidden_size=48, intermediate_size=64)
    decoder = load(path, WeightFormat.INT8, BF16, kernels=KernelChoice.NATIVE)
    # 48 columns: qkv, gate_up and the head. 64: the attention's output and down.
    assert decoder.describe_weights() == "bf16 and int8 (layers), bf16 (head)"


def blocks_of(tensor: torch.Tensor, bits: int) -> BlockTensor:
    kind = {4: Kind.Q4_1, 8: Kind.Q8_0}[bits]
    raw = gguf.quantize(tensor.float().numpy(), kind)
    return BlockTensor(BlockFormat[kind.name], torch.from_numpy(raw))


class Recoded:
    """A checkpoint whose matrices are quantized to chosen types, as a GGUF file may have them."""

    def __init__(self, directory: Path, bits: dict[str, int]) -> None:
        self._inner = open_checkpoint(directory)
        self.path, self.config, self.fingerprint = directory, self._inner.config, self._inner.fingerprint
        self._bits = bits
        self.files = ()

    def release(self) -> None:
        """Nothing is mapped."""

    def tensor(self, name: str, order: torch.Tensor | None = None) -> torch.Tensor | BlockTensor:
        tensor = self._inner.tensor(name, order)
        assert isinstance(tensor, torch.Tensor)
        bits = next((bits for part, bits in self._bits.items() if part in name), 0)
        return blocks_of(tensor, bits) if bits and tensor.dim() == 2 else tensor

    def tokenizer_files(self) -> None:
        raise AssertionError("not needed")


@pytest.mark.parametrize(
    "bits, weights, described",
    [
        ({"layers": 4, "embed": 8}, "auto", "Q4_1 (layers), Q8_0 (head)"),
        ({"layers": 4, "embed": 8}, "native", "Q4_1 (layers), Q8_0 (head)"),
        ({"layers": 4, "embed": 8}, "int8", "int8 (layers), int8 (head)"),
        ({"layers": 4, "embed": 8}, "int4", "int4 (layers), int4 (head)"),
        ({"layers": 4, "embed": 8}, "bf16", "bf16 (layers), bf16 (head)"),
        ({"v_proj": 8, "up_proj": 0, "layers": 4}, "auto", "Q4_1 and Q8_0 and bf16 (layers), bf16 (head)"),
    ],
)
def test_formats_of_a_quantized_checkpoint(
    bits: dict[str, int], weights: str, described: str, directory: Path
) -> None:
    checkpoint = Recoded(directory, bits)
    decoder = load_decoder(
        checkpoint,
        dtype=BF16,
        weights=WeightFormat(weights),
        numerics=Numerics.FAST,
        kernels=native.load(KernelChoice.NATIVE),
    )
    assert decoder.describe_weights() == described
    reference = load_decoder(
        checkpoint, dtype=F32, weights=WeightFormat.FLOAT32, numerics=Numerics.FAST, kernels=None
    )
    expected = decoder_logits(reference, TOKENS)
    error = (decoder_logits(decoder, TOKENS) - expected).abs().mean() / expected.abs().mean()
    assert error < (0.1 if weights == "int4" else 0.03)


def test_integers_of_the_file_are_not_requantized(directory: Path) -> None:
    """int8 of a 4-bit tensor, and native, give the very numbers of the file."""
    checkpoint = Recoded(directory, {"layers": 4, "embed": 4})

    def logits(weights: WeightFormat) -> torch.Tensor:
        decoder = load_decoder(checkpoint, dtype=F32, weights=weights, numerics=Numerics.FAST, kernels=None)
        return decoder_logits(decoder, TOKENS)

    expected = logits(WeightFormat.FLOAT32)
    for weights in (WeightFormat.NATIVE, WeightFormat.INT8, WeightFormat.INT4):
        assert torch.equal(logits(weights), expected)


QWEN = transformers.Qwen2Config(
    vocab_size=71,
    hidden_size=256,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    tie_word_embeddings=False,
)


def write_qwen(path: Path, kinds: dict[str, Kind], spoil: str = "") -> Path:
    """A random Qwen 2, with biases and a head of its own: Q4_K where `kinds` says nothing else.

    The scales of the tensor `spoil` are not all finite.
    """
    writer = gguf.GGUFWriter(path, "qwen2")
    gguf_files.add_geometry(writer, QWEN)
    shapes = {"token_embd": (71, 256), "output": (71, 256)}
    for layer in range(QWEN.num_hidden_layers):
        rows = {"attn_q": 256, "attn_k": 128, "attn_v": 128, "attn_output": 256}
        rows |= {"ffn_gate": 256, "ffn_up": 256, "ffn_down": 256}
        shapes |= {f"blk.{layer}.{name}": (count, 256) for name, count in rows.items()}
        for seed, name in enumerate(("attn_q", "attn_k", "attn_v")):
            bias = np.random.default_rng(seed).normal(size=rows[name]).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.bias", bias)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(256, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(256, dtype=np.float32))
    for seed, (name, shape) in enumerate(shapes.items()):
        kind = next((kind for part, kind in kinds.items() if part in name), Kind.Q4_K)
        if kind is Kind.F16:
            data = np.random.default_rng(seed).normal(0, 0.1, shape).astype(np.float16)
        else:
            data = gguf_files.random_weights(kind, *shape, deviation=0.1, seed=seed)
        if name == spoil:
            data[1, :2] = np.array([np.inf], dtype=np.float16).view(np.uint8)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)
    return gguf_files.finish(writer, path)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    "kinds, described",
    [
        ({"attn_v": Kind.F16}, "Q4_K and float32 (layers), Q4_K (head)"),
        ({"attn_q": Kind.F16, "ffn_up": Kind.F16}, "float32 and Q4_K (layers), Q4_K (head)"),
        ({"attn_k": Kind.Q6_K, "output": Kind.F16}, "Q4_K and Q6_K and float32 (layers), float32 (head)"),
    ],
    ids=["values", "queries and up", "head"],
)
def test_parts_of_one_matrix_in_floats_and_in_blocks(
    kinds: dict[str, Kind], described: str, tmp_path: Path
) -> None:
    """Each part keeps its own numbers and its own bias."""
    path = write_qwen(tmp_path / "qwen.gguf", kinds)
    decoder = load(path, kernels=KernelChoice.NATIVE)
    assert decoder.describe_weights() == described
    assert decoder.fused is None
    expected = decoder_logits(load(path), TOKENS)
    error = (decoder_logits(decoder, TOKENS) - expected).abs().mean() / expected.abs().mean()
    assert error < 0.05


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("kernels", [KernelChoice.TORCH, KernelChoice.NATIVE])
@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q4_1, Kind.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["token_embd", "output", "blk.1.ffn_down", "blk.0.attn_k"])
def test_scales_that_are_not_numbers_are_refused_by_name(
    name: str, kind: Kind, kernels: KernelChoice, tmp_path: Path
) -> None:
    path = write_qwen(tmp_path / "qwen.gguf", {"": kind}, spoil=name)
    with pytest.raises(CorruptCheckpoint, match=rf"tensor {name}\.weight holds scales that are not finite"):
        load(path, kernels=kernels)


def test_quantized_file_end_to_end(tmp_path: Path) -> None:
    data = gguf_files.random_blocks(Kind.Q8_0, 40, 64)
    checkpoint = open_checkpoint(gguf_files.write_tensor(tmp_path / "x.gguf", data, Kind.Q8_0, 64))
    assert checkpoint.config.vocab_size == 40
    assert checkpoint.config.tied_head


def test_default_model(default_model: Path) -> None:
    started = time.perf_counter()
    decoder = load(default_model, dtype=BF16, kernels=KernelChoice.AUTO)
    elapsed = time.perf_counter() - started
    assert decoder.num_parameters == 134_515_008
    assert decoder.config.eos_token_ids == (2,)
    assert elapsed < 30  # a fraction of a second on a quiet machine; this only catches the absurd
    # "The capital of France is Paris. The capital of Germany is" -> " Berlin"
    tokens = [504, 3575, 282, 4649, 314, 7042, 30, 378, 3575, 282, 4521, 314]
    assert int(decoder_logits(decoder, tokens)[-1].argmax()) == 11452

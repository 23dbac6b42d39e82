"""GGUF files: every tensor type, every architecture, and everything that can be wrong with one."""

import struct
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings, strategies as st

from kakeya.errors import CorruptCheckpoint, ModelError, ModelNotFound, UnsupportedModel
from kakeya.models.blocks import BlockFormat, BlockTensor
from kakeya.models.checkpoint import Checkpoint, open_checkpoint
from kakeya.models.config import ModelConfig
from kakeya.models.gguf_file import GgufFile
from kakeya.models.loader import load_decoder
from kakeya.models.rope import DivisorScaling, LinearScaling, YarnScaling
from kakeya.types import DType, Numerics, WeightFormat
from support import gguf_files
from support.families import GEMMA4, SHAPE, VOCAB, decoder_logits, expected_logits, save_random

TOKENS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
LLAMA = transformers.LlamaConfig(**SHAPE)
GEMMA_SHAPE = SHAPE | {"num_hidden_layers": 7, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN_METADATA = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 16,
}
MODELS = {
    "llama": (LLAMA, {}),
    "llama tied with biases": (
        transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        {"attention__head_count_kv": [2, 2, 2]},
    ),
    "qwen2": (transformers.Qwen2Config(**SHAPE), {}),
    "qwen3": (transformers.Qwen3Config(**SHAPE, head_dim=16), {}),
    "gemma2": (
        transformers.Gemma2Config(**GEMMA_SHAPE, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
        {"attention__sliding_window": 6, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (transformers.Gemma3TextConfig(**GEMMA_SHAPE), {"attention__sliding_window": 6}),
    "gemma4": (
        transformers.Gemma4TextConfig(
            **GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=5.0
        ),
        {
            "attention__key_length": 32,
            "attention__value_length": 32,
            "attention__key_length_swa": 16,
            "attention__value_length_swa": 16,
            "attention__head_count_kv": [4, 1, 4, 1],
            "attention__sliding_window": 5,
            "attention__sliding_window_pattern": [True, False, True, False],
            "attention__shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "rope__dimension_count": 32,
            "rope__dimension_count_swa": 16,
            "final_logit_softcapping": 5.0,
        },
    ),
    "mistral": (transformers.MistralConfig(**SHAPE, head_dim=16, sliding_window=None), {}),
    "ministral3": (
        transformers.Ministral3Config(
            **SHAPE,
            head_dim=32,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        ),
        YARN_METADATA | {"rope__scaling__yarn_log_multiplier": 1.0, "attention__temperature_scale": 0.3},
    ),
    "phi3": (transformers.Phi3Config(**SHAPE, sliding_window=6), {"attention__sliding_window": 6}),
    "phi3 partial": (
        transformers.Phi3Config(
            **SHAPE | {"num_attention_heads": 2},
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75},
        ),
        {"rope__dimension_count": 12, "attention__sliding_window": 0},
    ),
    "smollm3": (
        transformers.SmolLM3Config(**SHAPE | {"num_hidden_layers": 5}, tie_word_embeddings=True),
        {"rope__dimension_count": 8},
    ),
    "olmo2": (transformers.Olmo2Config(**SHAPE), {}),
    "olmo3": (
        transformers.Olmo3Config(
            **SHAPE | {"num_hidden_layers": 5},
            sliding_window=6,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": YARN,
            },
        ),
        YARN_METADATA
        | {
            "attention__sliding_window": 6,
            "attention__sliding_window_pattern": [True, True, True, False, True],
        },
    ),
    "granite": (
        transformers.GraniteConfig(
            **SHAPE,
            embedding_multiplier=12.0,
            attention_multiplier=0.2,
            residual_multiplier=0.22,
            logits_scaling=0.5,
            rms_norm_eps=1e-2,
        ),
        {"attention__scale": 0.2, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 0.5},
    ),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> transformers.PreTrainedModel:
    return save_random(LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llama_file(llama: transformers.PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write_model(tmp_path_factory.mktemp("gguf") / "llama.gguf", llama)


def logits_of(checkpoint: Checkpoint) -> torch.Tensor:
    decoder = load_decoder(
        checkpoint, dtype=DType.FLOAT32, weights=WeightFormat.NATIVE, numerics=Numerics.FAST, kernels=None
    )
    return decoder_logits(decoder, TOKENS)


def config_with(llama: transformers.PreTrainedModel, path: Path, **metadata: object) -> ModelConfig:
    return open_checkpoint(gguf_files.write_model(path / "model.gguf", llama, **metadata)).config


@pytest.mark.parametrize("case", MODELS)
def test_logits_agree_with_transformers(case: str, tmp_path: Path) -> None:
    config, metadata = MODELS[case]
    model = save_random(config, tmp_path)
    # Gemma 4's global layers turn a quarter of their pairs; so its files say the others are divided away.
    still = {"rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32)}
    path = gguf_files.write_model(
        tmp_path / "model.gguf", model, still if case == "gemma4" else None, **metadata
    )
    found = logits_of(open_checkpoint(path))
    assert (found - expected_logits(model, TOKENS)).abs().max() <= 1e-4


def test_llama3_scaling_through_its_tensor(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = save_random(transformers.LlamaConfig(**SHAPE, head_dim=32, rope_parameters=rope), tmp_path)
    plain = 500.0 ** -(np.arange(0, 32, 2) / 32)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors[0] == 1
    assert divisors[-1] > 7.9
    path = gguf_files.write_model(tmp_path / "x.gguf", model, {"rope_freqs.weight": divisors})
    assert (logits_of(open_checkpoint(path)) - expected_logits(model, TOKENS)).abs().max() <= 1e-4


@pytest.mark.parametrize("original", [40, 32], ids=["short", "long"])
def test_longrope_through_its_tensors(original: int, tmp_path: Path) -> None:
    short, long = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    config = transformers.Phi3Config(
        **SHAPE | {"num_attention_heads": 2},
        original_max_position_embeddings=original,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": short,
            "long_factor": long,
            "partial_rotary_factor": 0.75,
        },
    )
    model = save_random(config, tmp_path)
    growth = (1 + np.log(128 / original) / np.log(original)) ** 0.5
    path = gguf_files.write_model(
        tmp_path / "x.gguf",
        model,
        {
            "rope_factors_short.weight": np.array(short, dtype=np.float32),
            "rope_factors_long.weight": np.array(long, dtype=np.float32),
        },
        rope__dimension_count=12,
        rope__scaling__original_context_length=original,
        rope__scaling__attn_factor=float(growth),
    )
    assert (logits_of(open_checkpoint(path)) - expected_logits(model, TOKENS)).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_float_types(kind: Kind, tmp_path: Path) -> None:
    data = gguf_files.float_bytes(kind, 5, 64)
    path = gguf_files.write_tensor(tmp_path / "x.gguf", data, kind, 64)
    found = open_checkpoint(path).tensor("model.embed_tokens.weight")
    assert isinstance(found, torch.Tensor)
    assert found.shape == (5, 64)
    assert found.float().equal(
        torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).to(found.dtype).float()
    )


@pytest.mark.parametrize("kind", gguf_files.SCALE_OFFSETS)
def test_quantized_types_equal_the_gguf_package(kind: Kind, tmp_path: Path) -> None:
    data = gguf_files.random_blocks(kind, 7, 512)
    path = gguf_files.write_tensor(tmp_path / "x.gguf", data, kind, 512)
    found = open_checkpoint(path).tensor("model.embed_tokens.weight")
    if kind.name in BlockFormat.__members__:
        assert isinstance(found, BlockTensor)
        assert found.format is BlockFormat[kind.name]
        assert np.array_equal(found.raw.numpy(), data)
        found = found.dequantize()
    assert isinstance(found, torch.Tensor)
    assert np.array_equal(found.numpy(), gguf.dequantize(data, kind))


@pytest.mark.parametrize("name, heads", [("q", 4), ("k", 2), ("v", None)])
def test_quantized_rows_are_put_back_in_order(name: str, heads: int | None, tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    stored = rows if heads is None else gguf_files.interleaved(rows, heads)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    gguf_files.add_geometry(writer, transformers.LlamaConfig(**SHAPE))
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, 64), dtype=np.float32))
    writer.add_tensor(f"blk.0.attn_{name}.weight", gguf.quantize(stored, Kind.Q4_1), raw_dtype=Kind.Q4_1)
    checkpoint = open_checkpoint(gguf_files.finish(writer, tmp_path / "x.gguf"))
    found = checkpoint.tensor(f"model.layers.0.self_attn.{name}_proj.weight")
    assert isinstance(found, BlockTensor)
    expected = gguf.dequantize(gguf.quantize(rows, Kind.Q4_1), Kind.Q4_1)
    assert np.array_equal(found.dequantize().numpy(), expected)


def test_quantized_biases_are_put_back_in_order(tmp_path: Path) -> None:
    bias = np.random.default_rng(0).normal(size=32).astype(np.float32)
    stored = gguf.quantize(gguf_files.interleaved(bias, 4)[None], Kind.Q8_0)[0]
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    gguf_files.add_geometry(writer, transformers.LlamaConfig(**SHAPE))
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, 64), dtype=np.float32))
    writer.add_tensor("blk.0.attn_q.bias", stored, raw_dtype=Kind.Q8_0)
    checkpoint = open_checkpoint(gguf_files.finish(writer, tmp_path / "x.gguf"))
    found = checkpoint.tensor("model.layers.0.self_attn.q_proj.bias")
    assert isinstance(found, torch.Tensor)
    assert np.allclose(found.numpy(), bias, atol=0.02)


def test_tokens_that_end_a_turn(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    gguf_files.add_geometry(writer, llama.config)
    writer.add_tensor("token_embd.weight", np.zeros((5, 32), dtype=np.float32))
    writer.add_token_list(["a", "</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>"])
    writer.add_token_types([1, 3, 1, 3, 3])  # <|im_end|> is ordinary text here
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    config = open_checkpoint(gguf_files.finish(writer, tmp_path / "x.gguf")).config
    assert config.eos_token_ids == (1, 3, 4)
    assert config.bos_token_id == 0


def test_rope_scaling(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    linear = config_with(llama, tmp_path, rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert linear.layer_ropes[0].scaling == LinearScaling(4.0)
    older = config_with(llama, tmp_path, rope__scale_linear=2.0)
    assert older.layer_ropes[0].scaling == LinearScaling(2.0)
    yarn = config_with(
        llama,
        tmp_path,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=32,
        rope__scaling__attn_factor=2.0,
    )
    assert yarn.layer_ropes[0].scaling == YarnScaling(4.0, 32, pytest.approx(2 * 1.1386, abs=1e-3))
    with pytest.raises(UnsupportedModel, match="'longrope'"):
        config_with(llama, tmp_path, rope__scaling__type="longrope")


def test_rope_divisors_come_from_their_tensor(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    gguf_files.add_geometry(writer, llama.config)
    writer.add_tensor("token_embd.weight", np.zeros((5, 32), dtype=np.float32))
    writer.add_tensor("rope_freqs.weight", np.array([1, 2, 4, 8], dtype=np.float32))
    config = open_checkpoint(gguf_files.finish(writer, tmp_path / "x.gguf")).config
    assert {rope.scaling for rope in config.layer_ropes} == {DivisorScaling((1.0, 2.0, 4.0, 8.0))}


def test_gemma_facts_that_files_leave_out(tmp_path: Path) -> None:
    shape = GEMMA_SHAPE | {"num_hidden_layers": 46, "hidden_size": 32, "num_attention_heads": 2}
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gemma2")
    gguf_files.add_geometry(writer, transformers.Gemma2Config(**shape))
    writer.add_tensor("token_embd.weight", np.zeros((5, 32), dtype=np.float32))
    config = open_checkpoint(gguf_files.finish(writer, tmp_path / "x.gguf")).config
    assert config.query_scale == 16**-0.5  # 27B divides by the hidden size per head
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert set(config.layer_windows) == {None}


def test_query_scale_that_the_file_states(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    assert config_with(llama, tmp_path, attention__scale=0.5).query_scale == 0.5


def test_a_stated_window_counts(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    assert config_with(llama, tmp_path, attention__sliding_window=7).layer_windows == (7, 7, 7)


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope__dimension_count": 4}, "partial rotary"),
        ({"attention__value_length": 16}, "values of 16 dimensions"),
        ({"attention__head_count_kv": [2, 1, 2]}, "attention.head_count_kv that differs between layers"),
    ],
)
def test_refused_features(
    llama: transformers.PreTrainedModel, tmp_path: Path, metadata: dict[str, object], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        config_with(llama, tmp_path, **metadata)


@pytest.mark.parametrize(
    "metadata, error, message",
    [
        ({"embedding_length_per_layer_input": 256}, UnsupportedModel, "an embedding for each layer"),
        ({"attention__shared_kv_layers": 20}, UnsupportedModel, "last 20 layers attend to the keys"),
        ({"attention__head_count_kv": [2, 2]}, CorruptCheckpoint, "head_count_kv must be 3 positive numbers"),
        ({"attention__head_count_kv": [2, 0, 2]}, CorruptCheckpoint, "must be 3 positive numbers"),
        ({"attention__sliding_window_pattern": [True]}, CorruptCheckpoint, "must be 3 times true or false"),
        ({"attention__sliding_window_pattern": 0}, CorruptCheckpoint, "pattern must be at least 1"),
        ({"expert_count": 128}, UnsupportedModel, "mixture of experts"),
    ],
)
def test_what_not_every_gemma4_has(
    metadata: dict[str, object], error: type[ModelError], message: str, tmp_path: Path
) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "gemma4")
    gguf_files.add_geometry(writer, transformers.Qwen3Config(**SHAPE, head_dim=8), stated=metadata)
    gguf_files.add_metadata(writer, metadata)
    writer.add_tensor("token_embd.weight", np.zeros((5, 32), dtype=np.float32))
    path = gguf_files.finish(writer, tmp_path / "x.gguf")
    with pytest.raises(error, match=message):
        open_checkpoint(path)


def test_granites_numbers_must_be_positive(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "granite")
    gguf_files.add_geometry(writer, LLAMA)
    gguf_files.add_metadata(writer, {"residual_scale": 0.0})
    writer.add_tensor("token_embd.weight", np.zeros((5, 32), dtype=np.float32))
    path = gguf_files.finish(writer, tmp_path / "x.gguf")
    with pytest.raises(CorruptCheckpoint, match="residual_scale must be positive"):
        open_checkpoint(path)


def test_rows_that_cannot_be_reordered(tmp_path: Path) -> None:
    """A head rotated in part, and a tensor that is too short for its heads."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "phi3")
    gguf_files.add_geometry(writer, LLAMA)
    gguf_files.add_metadata(writer, {"rope__dimension_count": 6})
    for name, rows in (("token_embd", 5), ("blk.0.attn_qkv", 24)):
        writer.add_tensor(f"{name}.weight", np.zeros((rows, 32), dtype=np.float32))
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros(32, dtype=np.float32))
    writer.add_tensor("blk.0.ffn_norm.weight", np.zeros(32, dtype=np.float32))
    path = gguf_files.finish(writer, tmp_path / "x.gguf")
    with pytest.raises(CorruptCheckpoint, match="has 24 rows, the configuration needs 64"):
        logits_of(open_checkpoint(path))


@pytest.mark.parametrize("architecture", ["mamba", "mistral", "granitehybrid", "phimoe"])
def test_refused_architecture(architecture: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", architecture)
    writer.add_tensor("token_embd.weight", np.zeros((5, 32), dtype=np.float32))
    with pytest.raises(
        UnsupportedModel, match=f"'{architecture}' is not supported; supported families: llama"
    ):
        open_checkpoint(gguf_files.finish(writer, tmp_path / "x.gguf"))


def test_missing_tensor(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    gguf_files.add_geometry(writer, llama.config)
    writer.add_tensor("token_embd.weight", np.zeros((5, 32), dtype=np.float32))
    checkpoint = open_checkpoint(gguf_files.finish(writer, tmp_path / "x.gguf"))
    with pytest.raises(CorruptCheckpoint, match=r"blk.0.attn_norm.weight .* is missing"):
        logits_of(checkpoint)


def test_missing_embedding(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    gguf_files.add_geometry(writer, llama.config)
    with pytest.raises(CorruptCheckpoint, match=r"token_embd.weight is missing"):
        open_checkpoint(gguf_files.finish(writer, tmp_path / "x.gguf"))


def test_rows_that_heads_cannot_share(llama: transformers.PreTrainedModel, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    gguf_files.add_geometry(writer, llama.config)
    writer.add_tensor("token_embd.weight", np.zeros((5, 32), dtype=np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((30, 32), dtype=np.float32))
    checkpoint = open_checkpoint(gguf_files.finish(writer, tmp_path / "x.gguf"))
    with pytest.raises(CorruptCheckpoint, match="has 30 rows, which 4 heads cannot share"):
        checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("kind, offset", [(Kind.Q4_0, 0), (Kind.Q8_0, 0), (Kind.Q4_1, 2), (Kind.Q6_K, 208)])
def test_scales_that_are_not_numbers(kind: Kind, offset: int, tmp_path: Path) -> None:
    data = gguf_files.random_blocks(kind, 3, 256)
    data[1, offset : offset + 2] = np.array([np.inf], dtype=np.float16).view(np.uint8)
    checkpoint = open_checkpoint(gguf_files.write_tensor(tmp_path / "x.gguf", data, kind, 256))
    blocks = checkpoint.tensor("model.embed_tokens.weight")
    assert isinstance(blocks, BlockTensor)
    with pytest.raises(CorruptCheckpoint, match="token_embd.weight holds scales that are not finite"):
        blocks.check()


def test_unsupported_tensor_type(tmp_path: Path) -> None:
    data = np.zeros((4, 64), dtype=np.int8).view(np.uint8)
    checkpoint = open_checkpoint(gguf_files.write_tensor(tmp_path / "x.gguf", data, Kind.I8, 64))
    with pytest.raises(UnsupportedModel, match="type I8"):
        checkpoint.tensor("model.embed_tokens.weight")


def test_fingerprint_is_the_files_own(
    llama: transformers.PreTrainedModel, llama_file: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(llama_file.read_bytes())
    other = bytearray(llama_file.read_bytes())
    other[-1] ^= 1  # the last byte of the last tensor
    (tmp_path / "other.gguf").write_bytes(other)
    fingerprint = open_checkpoint(llama_file).fingerprint
    assert open_checkpoint(copy).fingerprint == fingerprint
    assert open_checkpoint(tmp_path / "other.gguf").fingerprint != fingerprint
    assert len(fingerprint) == 64


def test_tokenizer_files_come_from_the_metadata(default_model: Path) -> None:
    files = open_checkpoint(default_model).tokenizer_files()
    assert files.eos_token == "<|im_end|>"
    assert files.chat_template is not None


def header(*, version: int = 3, tensors: int = 0, entries: bytes = b"", count: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, count) + entries


def key(name: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + value


def entry(name: str, shape: list[int], kind: int = 0, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name.encode() + dims + struct.pack("<IQ", kind, offset)


@pytest.mark.parametrize(
    "content, error, message",
    [
        (b"", CorruptCheckpoint, "truncated"),
        (b"not a model at all", CorruptCheckpoint, "not a GGUF file"),
        (header(version=1), UnsupportedModel, "version 1"),
        (header(version=3 << 24), UnsupportedModel, "little-endian"),
        (header(count=1, entries=key("a", 13, b"")), CorruptCheckpoint, "value type 13"),
        (header(count=1, entries=key("a", 9, struct.pack("<IQ", 9, 1))), CorruptCheckpoint, "array type 9"),
        (header(count=1, entries=key("a", 9, struct.pack("<IQ", 8, 2**60))), CorruptCheckpoint, "truncated"),
        (header(count=1, entries=key("a", 9, struct.pack("<IQ", 4, 2**60))), CorruptCheckpoint, "truncated"),
        (
            header(count=1, entries=key("a", 8, struct.pack("<Q", 2) + b"\xff\xff")),
            CorruptCheckpoint,
            "UTF-8",
        ),
        (header(count=1, entries=key("a", 8, struct.pack("<Q", 99))), CorruptCheckpoint, "truncated"),
        (header(count=1, entries=key("general.alignment", 4, b"\x07\0\0\0")), CorruptCheckpoint, "alignment"),
        (header(tensors=1, entries=entry("t", [])), CorruptCheckpoint, "0 dimensions"),
        (header(tensors=1, entries=entry("t", [4, 0])), CorruptCheckpoint, "is empty"),
        (
            header(tensors=1, entries=entry("t", [33], kind=2)),
            CorruptCheckpoint,
            "not a multiple of Q4_0's 32",
        ),
        (header(tensors=1, entries=entry("t", [4], kind=999)), UnsupportedModel, "unknown type 999"),
        (header(tensors=1, entries=entry("t", [4], offset=3)), CorruptCheckpoint, "not aligned"),
        (header(tensors=1, entries=entry("t", [2**40, 2**40])), CorruptCheckpoint, "truncated"),
    ],
)
def test_malformed_files(content: bytes, error: type[ModelError], message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(error, match=message):
        open_checkpoint(path)


def test_all_scalar_types_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "qwen2")
    gguf_files.add_geometry(writer, transformers.Qwen2Config(**SHAPE))
    values = {
        "u8": 200,
        "i8": -5,
        "u16": 60000,
        "i16": -300,
        "u64": 2**60,
        "i64": -(2**60),
        "f64": 0.1,
        "flag": True,
    }
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -5)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_uint64("u64", 2**60)
    writer.add_key_value("i64", -(2**60), gguf.GGUFValueType.INT64)
    writer.add_float64("f64", 0.1)
    writer.add_bool("flag", True)
    writer.add_array("flags", [True, False])
    writer.add_array("numbers", [1.5, 2.5])
    metadata = GgufFile(gguf_files.finish(writer, tmp_path / "x.gguf")).metadata
    assert {name: metadata[name] for name in values} == values
    assert metadata["flags"] == [True, False]
    assert metadata["numbers"] == [1.5, 2.5]


@settings(max_examples=60)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_always_named(share: float, llama_file: Path) -> None:
    whole = llama_file.read_bytes()
    cut = llama_file.with_name("cut.gguf")
    cut.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CorruptCheckpoint, match="truncated"):
        open_checkpoint(cut)


@settings(max_examples=150)
@given(position=st.integers(0, 2200), value=st.integers(0, 255))
def test_a_damaged_header_never_escapes_as_a_foreign_error(
    position: int, value: int, llama_file: Path
) -> None:
    content = bytearray(llama_file.read_bytes())
    content[position] = value
    damaged = llama_file.with_name("damaged.gguf")
    damaged.write_bytes(content)
    with suppress(ModelError):
        logits_of(open_checkpoint(damaged))


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"none.gguf cannot be read: No such file"):
        open_checkpoint(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFound, match="is not a path"):
        open_checkpoint("a\0b")


def test_file_that_vanishes_between_looking_and_mapping(llama_file: Path) -> None:
    with pytest.raises(ModelNotFound, match="Is a directory"):
        GgufFile(llama_file.parent)

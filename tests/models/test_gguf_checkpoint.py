"""Checkpoints in GGUF files: every tensor type, rows put back in order, and tensors that are wrong."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from kakeya.errors import CorruptCheckpoint, UnsupportedModel
from kakeya.models.blocks import BlockFormat, BlockTensor
from kakeya.models.checkpoint import open_checkpoint
from support import gguf_files
from support.families import VOCAB, load_float32


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
    gguf_files.add_geometry(writer, gguf_files.LLAMA)
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
    gguf_files.add_geometry(writer, gguf_files.LLAMA)
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB, 64), dtype=np.float32))
    writer.add_tensor("blk.0.attn_q.bias", stored, raw_dtype=Kind.Q8_0)
    checkpoint = open_checkpoint(gguf_files.finish(writer, tmp_path / "x.gguf"))
    found = checkpoint.tensor("model.layers.0.self_attn.q_proj.bias")
    assert isinstance(found, torch.Tensor)
    assert np.allclose(found.numpy(), bias, atol=0.02)


def test_rows_that_cannot_be_reordered(tmp_path: Path) -> None:
    """A head rotated in part, and a tensor that is too short for its heads."""
    norm = np.zeros(32, dtype=np.float32)
    tensors = {"blk.0.attn_qkv.weight": np.zeros((24, 32), dtype=np.float32)}
    tensors |= {"blk.0.attn_norm.weight": norm, "blk.0.ffn_norm.weight": norm}
    path = gguf_files.write_bare(
        tmp_path / "x.gguf", architecture="phi3", tensors=tensors, rope__dimension_count=6
    )
    with pytest.raises(CorruptCheckpoint, match="has 24 rows, the configuration needs 64"):
        load_float32(path)


def test_missing_tensor(tmp_path: Path) -> None:
    path = gguf_files.write_bare(tmp_path / "x.gguf")
    with pytest.raises(CorruptCheckpoint, match=r"blk.0.attn_norm.weight .* is missing"):
        load_float32(path)


def test_rows_that_heads_cannot_share(tmp_path: Path) -> None:
    tensors = {"blk.0.attn_q.weight": np.zeros((30, 32), dtype=np.float32)}
    checkpoint = open_checkpoint(gguf_files.write_bare(tmp_path / "x.gguf", tensors=tensors))
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


def test_fingerprint_is_the_files_own(tmp_path: Path) -> None:
    ours, copy = gguf_files.write_bare(tmp_path / "x.gguf"), tmp_path / "copy.gguf"
    copy.write_bytes(ours.read_bytes())
    other = bytearray(ours.read_bytes())
    other[-1] ^= 1  # the last byte of the last tensor
    (tmp_path / "other.gguf").write_bytes(other)
    fingerprint = open_checkpoint(ours).fingerprint
    assert open_checkpoint(copy).fingerprint == fingerprint
    assert open_checkpoint(tmp_path / "other.gguf").fingerprint != fingerprint
    assert len(fingerprint) == 64


def test_tokenizer_files_come_from_the_metadata(default_model: Path) -> None:
    files = open_checkpoint(default_model).tokenizer_files()
    assert files.eos_token == "<|im_end|>"
    assert files.chat_template is not None

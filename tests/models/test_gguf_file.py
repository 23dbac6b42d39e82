"""GGUF files: their values, and everything that can be wrong with one."""

import struct
from contextlib import suppress
from pathlib import Path

import gguf
import pytest
import torch
import transformers
from hypothesis import given, settings, strategies as st

from kakeya.errors import CorruptCheckpoint, ModelError, ModelNotFound, UnsupportedModel
from kakeya.models.checkpoint import open_checkpoint
from kakeya.models.gguf_file import GgufFile
from support import gguf_files
from support.families import SHAPE, VOCAB, decoder_logits, load_float32, save_random

TOKENS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def llama_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole random model, so that damage can be anywhere."""
    folder = tmp_path_factory.mktemp("gguf")
    return gguf_files.write_model(folder / "llama.gguf", save_random(gguf_files.LLAMA, folder))


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
        decoder_logits(load_float32(damaged), TOKENS)


def test_file_that_vanishes_between_looking_and_mapping(llama_file: Path) -> None:
    with pytest.raises(ModelNotFound, match="Is a directory"):
        GgufFile(llama_file.parent)

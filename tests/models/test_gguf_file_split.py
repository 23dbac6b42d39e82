"""GGUF models split into several files: opened as one, and everything that can be wrong with the parts."""

import mmap
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest

from kakeya.errors import CorruptCheckpoint, ModelNotFound
from kakeya.models.checkpoint import open_checkpoint
from kakeya.models.gguf_file import GgufFile

NAMES = ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.attn_k.weight", "output_norm.weight", "x.weight"]
PARTS = [f"model-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def write(path: Path, tensors_per_part: int = 0, names: list[str] = NAMES, **split: int) -> None:
    """A Qwen-shaped model in as many files as its tensors need; `split` is written as it is."""
    writer = gguf.GGUFWriter(path, "qwen2", split_max_tensors=tensors_per_part)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in split.items():
        writer.add_uint32(f"split.{key}", value)
    for index, name in enumerate(names):
        writer.add_tensor(name, np.full((index + 1, 32), index, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """A folder with a model of five tensors in three files."""
    folder = tmp_path / "split"
    folder.mkdir()
    write(folder / "model.gguf", tensors_per_part=2)
    assert sorted(path.name for path in folder.iterdir()) == PARTS
    return folder


@pytest.mark.parametrize("name", PARTS)
def test_naming_any_part_opens_the_whole(split: Path, name: str, tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf")
    opened, whole = GgufFile(split / name), GgufFile(tmp_path / "whole.gguf")
    assert list(opened.tensors) == list(whole.tensors) == NAMES
    for tensor in NAMES:
        assert opened.raw(tensor).equal(whole.raw(tensor))
    assert opened.metadata["qwen2.embedding_length"] == 32


def test_all_files_are_named_in_order(split: Path) -> None:
    assert GgufFile(split / PARTS[1]).files == tuple(split / name for name in PARTS)
    assert open_checkpoint(split / PARTS[2]).files == tuple(split / name for name in PARTS)


@pytest.mark.parametrize("advised", [True, False])
def test_tensors_can_be_read_again_after_a_release(
    split: Path, advised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not advised:
        monkeypatch.delattr(mmap, "MADV_DONTNEED")
    opened = GgufFile(split / PARTS[0])
    views = {name: opened.raw(name) for name in NAMES}
    kept = {name: view.clone() for name, view in views.items()}
    opened.release()
    for name in NAMES:
        assert views[name].equal(kept[name])
        assert opened.raw(name).equal(kept[name])


def test_a_split_model_is_the_model(split: Path, tmp_path: Path) -> None:
    write(tmp_path / "whole.gguf")
    whole = open_checkpoint(tmp_path / "whole.gguf")
    for path in (split, split / PARTS[2]):
        checkpoint = open_checkpoint(path)
        assert checkpoint.config == whole.config
        assert checkpoint.fingerprint == whole.fingerprint


def test_a_first_part_without_tensors(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2", split_max_tensors=2, small_first_shard=True)
    for name in NAMES:
        writer.add_tensor(name, np.zeros((1, 32), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert list(GgufFile(tmp_path / "m-00004-of-00004.gguf").tensors) == NAMES


@pytest.mark.parametrize("count", [0, 1])
def test_a_file_that_says_it_is_not_split(count: int, tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", count=count)
    assert list(GgufFile(tmp_path / "m.gguf").tensors) == NAMES


def test_missing_parts_are_named(split: Path) -> None:
    (split / PARTS[0]).unlink()
    (split / PARTS[2]).unlink()
    for path in (split / PARTS[1], split):
        with pytest.raises(CorruptCheckpoint, match=rf"one of 3 parts, .*missing: {PARTS[0]}, {PARTS[2]}"):
            open_checkpoint(path)


def test_a_part_under_another_name(split: Path) -> None:
    (split / PARTS[0]).rename(split / "renamed.gguf")
    with pytest.raises(
        CorruptCheckpoint, match=r"renamed.gguf is one of 3 parts; the others cannot be found"
    ):
        GgufFile(split / "renamed.gguf")


def test_a_name_that_counts_otherwise(split: Path) -> None:
    (split / PARTS[0]).rename(split / "model-00001-of-00002.gguf")
    with pytest.raises(CorruptCheckpoint, match="one of 2 parts by its name, but of 3 by itself"):
        GgufFile(split / "model-00001-of-00002.gguf")


def test_parts_in_the_wrong_order(split: Path) -> None:
    shutil.move(split / PARTS[1], split / "aside")
    shutil.move(split / PARTS[2], split / PARTS[1])
    shutil.move(split / "aside", split / PARTS[2])
    with pytest.raises(CorruptCheckpoint, match=rf"{PARTS[1]}: as part 2 of 3 .* split.no must be 1, got 2"):
        GgufFile(split / PARTS[0])


def test_a_part_of_another_model(split: Path, tmp_path: Path) -> None:
    write(tmp_path / PARTS[2], names=["other.weight"], no=2, count=5)
    shutil.copy(tmp_path / PARTS[2], split)
    with pytest.raises(CorruptCheckpoint, match=rf"{PARTS[2]}: .* split.count must be 3, got 5"):
        GgufFile(split / PARTS[0])


def test_a_part_with_too_few_tensors(split: Path, tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", tensors_per_part=1, names=NAMES[:3])
    shutil.copy(tmp_path / PARTS[1], split)
    with pytest.raises(
        CorruptCheckpoint, match=r"with 4 tensors in all split.tensors.count must be 4, got 5"
    ):
        GgufFile(split / PARTS[0])


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", tensors_per_part=2, names=["aaaa", "b", "cccc", "d", "e"])
    second = tmp_path / PARTS[1]
    second.write_bytes(second.read_bytes().replace(b"cccc", b"aaaa"))
    with pytest.raises(CorruptCheckpoint, match=rf"tensor aaaa is in .*{PARTS[0]} and again in .*{PARTS[1]}"):
        GgufFile(tmp_path / PARTS[0])


def test_a_tensor_twice_in_one_file(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", names=["aaaa", "bbbb"])
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes().replace(b"bbbb", b"aaaa"))
    with pytest.raises(CorruptCheckpoint, match="tensor aaaa is there twice"):
        GgufFile(tmp_path / "m.gguf")


def test_a_folder_with_several_models_names_them(split: Path) -> None:
    write(split / "other-Q8_0.gguf")
    with pytest.raises(
        ModelNotFound, match=rf"several models, name one of them: {PARTS[0]}, other-Q8_0.gguf; .*:TAG"
    ):
        open_checkpoint(split)

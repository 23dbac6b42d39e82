"""Opening a checkpoint: what a path leads to, and paths that lead nowhere."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from kakeya.errors import ModelNotFound
from kakeya.models.checkpoint import open_checkpoint
from support import gguf_files
from support.families import SHAPE, save_random


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="neither a config.json nor a .gguf"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelNotFound, match="cannot be read: No such file"):
        open_checkpoint(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(
        ModelNotFound, match=r"notes.txt is not a GGUF file; give a .gguf file or a directory"
    ):
        open_checkpoint(tmp_path / "notes.txt")


def test_directory_with_gguf_files(tmp_path: Path) -> None:
    model = save_random(LlamaConfig(**SHAPE), tmp_path / "hf")
    (tmp_path / "one").mkdir()
    gguf_files.write_model(tmp_path / "one" / "a.gguf", model)
    assert open_checkpoint(tmp_path / "one").path.name == "a.gguf"
    gguf_files.write_model(tmp_path / "one" / "b.gguf", model)
    with pytest.raises(ModelNotFound, match=r"several models, name one of them: a.gguf, b.gguf"):
        open_checkpoint(tmp_path / "one")
    # Whatever its name, a GGUF file is known by its first bytes.
    renamed = (tmp_path / "one" / "a.gguf").rename(tmp_path / "one" / "sha256-0123")
    assert open_checkpoint(str(renamed)).config.num_layers == SHAPE["num_hidden_layers"]


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"none.gguf cannot be read: No such file"):
        open_checkpoint(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFound, match="is not a path"):
        open_checkpoint("a\0b")

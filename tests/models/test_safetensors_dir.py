"""Directories in Hugging Face layout: tokenizer files, and everything that can be wrong."""

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from kakeya.errors import CorruptCheckpoint, ModelError, ModelNotFound, UnsupportedModel
from kakeya.models.checkpoint import open_checkpoint
from kakeya.models.loader import load_decoder
from kakeya.models.safetensors_dir import SafetensorsDirectory
from kakeya.types import DType, Numerics, TokenizerFiles, WeightFormat
from support import tiny
from support.families import SHAPE, save_random


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.write_llama(tmp_path / "model")


def load(directory: Path) -> None:
    load_decoder(
        open_checkpoint(directory),
        dtype=DType.FLOAT32,
        weights=WeightFormat.AUTO,
        numerics=Numerics.FAST,
        kernels=None,
    )


def change_config(directory: Path, **changes: object) -> None:
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | changes))


def change_tensors(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(directory / "model.safetensors") | changes
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        directory / "model.safetensors",
    )


def test_generation_config_adds_end_tokens(directory: Path) -> None:
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [4, 1]}))
    assert open_checkpoint(directory).config.eos_token_ids == (4, 1)


def test_tokenizer_files(directory: Path) -> None:
    (directory / "tokenizer.json").write_text('{"é": 1}', encoding="utf-8")
    settings = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": "</s>",
        "unk_token": None,
        "chat_template": "{{ messages }}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = TokenizerFiles('{"é": 1}'.encode(), "{{ messages }}", "<s>", "</s>", None, None)
    assert open_checkpoint(directory).tokenizer_files() == expected


def test_tokenizer_without_settings(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    assert open_checkpoint(directory).tokenizer_files() == TokenizerFiles(b"{}")


def test_chat_template_among_several(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert open_checkpoint(directory).tokenizer_files().chat_template == "plain"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates[:1]}))
    assert open_checkpoint(directory).tokenizer_files().chat_template is None


def test_chat_template_in_its_own_file(directory: Path) -> None:
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old"}))
    (directory / "chat_template.jinja").write_text("new")
    assert open_checkpoint(directory).tokenizer_files().chat_template == "new"


def test_missing_tokenizer(directory: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no tokenizer.json"):
        open_checkpoint(directory).tokenizer_files()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"a": ', "not valid JSON"),
        (b"[1]", "must hold a JSON object"),
        (b"\xff", "not UTF-8"),
        (b"[" * 10**5, "JSON"),
    ],
)
def test_broken_json(name: str, content: bytes, message: str, directory: Path) -> None:
    (directory / name).write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=message):
        open_checkpoint(directory)


@settings(max_examples=40)
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_truncated_file_is_always_named(share: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    directory = tiny.write_llama(tmp_path_factory.mktemp("cut"))
    whole = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(CorruptCheckpoint, match="truncated or damaged"):
        open_checkpoint(directory)
    shutil.rmtree(directory)


def test_a_tensor_that_cannot_be_read(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    assert isinstance(checkpoint, SafetensorsDirectory)
    file, _ = checkpoint._tensors["model.norm.weight"]
    checkpoint._tensors["model.norm.weight"] = (file, "gone")
    with pytest.raises(CorruptCheckpoint, match=r"model.norm.weight cannot be read"):
        checkpoint.tensor("model.norm.weight")


def test_missing_tensor(directory: Path) -> None:
    change_tensors(directory, {"model.layers.1.mlp.up_proj.weight": None})
    with pytest.raises(CorruptCheckpoint, match=r"model.layers.1.mlp.up_proj.weight is missing"):
        load(directory)


def test_wrong_shape(directory: Path) -> None:
    change_tensors(directory, {"model.layers.0.self_attn.k_proj.weight": torch.zeros(32, 16)})
    with pytest.raises(CorruptCheckpoint, match=r"k_proj.weight has shape \(32, 16\), .* needs \(32, 32\)"):
        load(directory)


def test_config_that_does_not_fit_the_weights(directory: Path) -> None:
    change_config(directory, vocab_size=62)
    with pytest.raises(
        CorruptCheckpoint, match=r"embed_tokens.weight has shape \(61, 32\), .* needs \(62, 32\)"
    ):
        load(directory)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_tensors_that_are_not_plain_floats(dtype: torch.dtype, directory: Path) -> None:
    change_tensors(directory, {"model.norm.weight": torch.zeros(32).to(dtype)})
    with pytest.raises(UnsupportedModel, match=rf"model.norm.weight is stored as {dtype}"):
        load(directory)


def test_a_file_under_another_name(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "weights.safetensors")
    load(directory)
    shutil.copy(directory / "weights.safetensors", directory / "more.safetensors")
    with pytest.raises(CorruptCheckpoint, match="2 safetensors files but no"):
        open_checkpoint(directory)


def test_no_weights_at_all(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match="no safetensors file"):
        open_checkpoint(directory)
    (directory / "pytorch_model.bin").touch()
    with pytest.raises(UnsupportedModel, match="save them as safetensors"):
        open_checkpoint(directory)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}])
def test_index_without_a_weight_map(weight_map: object, directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CorruptCheckpoint, match="weight_map must map"):
        open_checkpoint(directory)


def test_missing_shard(tmp_path: Path) -> None:
    save_random(LlamaConfig(**SHAPE), tmp_path, max_shard_size="10KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(CorruptCheckpoint, match=f"{shard.name} is missing"):
        open_checkpoint(tmp_path)


def test_fingerprint(directory: Path, tmp_path: Path) -> None:
    fingerprint = open_checkpoint(directory).fingerprint
    assert open_checkpoint(shutil.copytree(directory, tmp_path / "copy")).fingerprint == fingerprint
    assert open_checkpoint(tiny.write_llama(tmp_path / "seed", seed=1)).fingerprint != fingerprint
    assert open_checkpoint(tiny.write_llama(tmp_path / "theta", rope_theta=200.0)).fingerprint != fingerprint


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_files_that_may_not_be_read(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not stop a superuser, so the refusal is played."""
    (directory / "tokenizer.json").write_text("{}")

    def refused(path: object, *_args: object, **_options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    if name == "model.safetensors":
        monkeypatch.setattr("kakeya.models.safetensors_dir.safe_open", refused)
    else:
        whole = Path.read_text
        monkeypatch.setattr(
            Path, "read_text", lambda path, **how: (refused if path.name == name else whole)(path, **how)
        )
    with pytest.raises(ModelNotFound, match=f"{name} cannot be read: Permission denied"):
        open_checkpoint(directory).tokenizer_files()


def test_directory_that_may_not_be_entered(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    checkpoint = open_checkpoint(directory)
    monkeypatch.setattr(Path, "is_file", refused)
    with pytest.raises(ModelNotFound, match="Permission denied"):
        open_checkpoint(directory)
    with pytest.raises(ModelNotFound, match="Permission denied"):
        checkpoint.tokenizer_files()


@settings(max_examples=60)
@given(position=st.integers(0, 2500), value=st.integers(0, 255))
def test_a_damaged_header_never_escapes_as_a_foreign_error(
    position: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tiny.write_llama(tmp_path_factory.mktemp("damaged"))
    content = bytearray((directory / "model.safetensors").read_bytes())
    content[position] = value
    (directory / "model.safetensors").write_bytes(content)
    with suppress(ModelError):
        load(directory)
    shutil.rmtree(directory)

"""A directory as Hugging Face writes it (config.json, safetensors, tokenizer files) as a Checkpoint."""

import json
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kakeya.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from kakeya.models.config import ModelConfig
from kakeya.models.fields import Fields
from kakeya.models.fingerprint import fingerprint
from kakeya.models.hf_config import config_from_hf
from kakeya.models.row_order import reordered
from kakeya.types import TokenizerFiles

_INDEX = "model.safetensors.index.json"
_FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# Where multimodal checkpoints keep the text decoder -> where plain ones do.
_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
# What Granite 4 calls an MLP -> what the others do.
_PARTS = (
    (".shared_mlp.input_linear.", ".mlp.gate_up_proj."),
    (".shared_mlp.output_linear.", ".mlp.down_proj."),
)


class SafetensorsDirectory:
    """Implements checkpoint.Checkpoint. Tensors are views of the mapped files.

    Raises ModelNotFound for what cannot be read, CorruptCheckpoint for broken JSON, a truncated or a
    missing weight file, UnsupportedModel for a network that is refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        generation = self._settings("generation_config.json")
        self.config: ModelConfig = config_from_hf(_read_json(path / "config.json"), generation)
        self._files = [_open(file) for file in _weight_files(path)]
        # Common name -> (file, name in that file)
        self._tensors = {_common_name(name): (file, name) for file in self._files for name in file.keys()}

    @property
    def files(self) -> tuple[Path, ...]:
        return ()

    @property
    def matrix_elements(self) -> Mapping[str, int]:
        return {}

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.config, self._described())

    def tensor(self, name: str, order: Tensor | None = None) -> Tensor:
        if name not in self._tensors:
            raise CorruptCheckpoint(f"{self.path}: tensor {name} is missing")
        file, stored = self._tensors[name]
        try:
            tensor: Tensor = file.get_tensor(stored)
        except SafetensorError as error:
            raise CorruptCheckpoint(f"{self.path}: tensor {name} cannot be read: {error}") from error
        if tensor.dtype not in _FLOAT_TYPES:
            raise UnsupportedModel(f"{self.path}: tensor {name} is stored as {tensor.dtype}, not as floats")
        return tensor if order is None else reordered(name, tensor, order)

    def release(self) -> None:
        """Nothing to do: what was read is either used as it is, or was a copy."""

    def tokenizer_files(self) -> TokenizerFiles:
        if not self._has("tokenizer.json"):
            raise UnsupportedModel(
                f"{self.path} has no tokenizer.json; other tokenizer formats are not supported"
            )
        name = "tokenizer_config.json"
        fields = Fields(self._settings(name) or {}, str(self.path / name))
        return TokenizerFiles(
            tokenizer_json=_read_text(self.path / "tokenizer.json").encode(),
            chat_template=self._chat_template(fields),
            bos_token=_special_token(fields, "bos_token"),
            eos_token=_special_token(fields, "eos_token"),
            unk_token=_special_token(fields, "unk_token"),
            pad_token=_special_token(fields, "pad_token"),
        )

    def _has(self, name: str) -> bool:
        return _exists(self.path / name)

    def _settings(self, name: str) -> dict[str, Any] | None:
        return _read_json(self.path / name) if self._has(name) else None

    def _chat_template(self, fields: Fields) -> str | None:
        if self._has("chat_template.jinja"):
            return _read_text(self.path / "chat_template.jinja")
        if not isinstance(fields.raw("chat_template"), list):
            return fields.maybe_text("chat_template")
        # Several named templates: [{"name": …, "template": …}, …]
        named = [
            Fields(item, "chat_template") for item in fields.raw("chat_template") if isinstance(item, dict)
        ]
        return next((item.text("template") for item in named if item.raw("name") == "default"), None)

    def _described(self) -> Iterator[tuple[str, str, Tensor]]:
        for name in sorted(self._tensors):
            if name.startswith(("model.", "lm_head.")):
                tensor = self.tensor(name)
                yield name, f"{tensor.dtype} {tuple(tensor.shape)}", tensor.flatten().view(torch.uint8)


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror or error}") from error


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise CorruptCheckpoint(f"{path} is not UTF-8 text") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _weight_files(directory: Path) -> list[Path]:
    """The shards that the index names, or the one safetensors file there is."""
    if _exists(directory / _INDEX):
        weight_map = Fields(_read_json(directory / _INDEX), str(directory / _INDEX)).raw("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(shard, str) for shard in weight_map.values()
        ):
            raise CorruptCheckpoint(f"{directory / _INDEX}: weight_map must map tensor names to file names")
        return [directory / shard for shard in sorted(set(weight_map.values()))]
    if _exists(directory / "model.safetensors"):
        return [directory / "model.safetensors"]
    found = sorted(directory.glob("*.safetensors"))
    if len(found) == 1:
        return found
    if found:
        raise CorruptCheckpoint(f"{directory} has {len(found)} safetensors files but no {_INDEX}")
    if any(directory.glob("*.bin")):
        raise UnsupportedModel(
            f"{directory}: pickled .bin weights are not supported; save them as safetensors"
        )
    raise CorruptCheckpoint(f"{directory} has a config.json but no safetensors file")


def _open(path: Path) -> Any:
    if not _exists(path):
        raise CorruptCheckpoint(f"{path} is missing")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CorruptCheckpoint(f"{path} is truncated or damaged: {error}") from error
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror or error}") from error


def _common_name(name: str) -> str:
    for stored, common in _PARTS:
        name = name.replace(stored, common)
    for stored, common in _PREFIXES:
        if name.startswith(stored):
            return common + name.removeprefix(stored)
    return name


def _special_token(fields: Fields, name: str) -> str | None:
    """A special token is written as its text, or as an object that holds it."""
    if isinstance(fields.raw(name), dict):
        section = fields.section(name)
        return section.maybe_text("content") if section is not None else None
    return fields.maybe_text(name)

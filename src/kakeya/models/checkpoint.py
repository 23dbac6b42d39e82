"""The door to a model's files: one protocol, whatever the format behind it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from kakeya.errors import ModelNotFound
from kakeya.models.blocks import BlockTensor
from kakeya.models.config import ModelConfig
from kakeya.models.gguf_names import models_in
from kakeya.models.safetensors_dir import SafetensorsDirectory
from kakeya.types import TokenizerFiles

# As gguf_file.MAGIC, which is not imported here: it needs a package that safetensors do without.
_GGUF_MAGIC = b"GGUF"


class Checkpoint(Protocol):
    """A model's configuration, tokenizer and weights. Opening reads headers only."""

    @property
    def path(self) -> Path: ...

    @property
    def files(self) -> Sequence[Path]:
        """The files that hold its quantized tensors, in order; none where it has no such tensors."""

    @property
    def matrix_elements(self) -> Mapping[str, int]:
        """How many elements the matrices in those files have in each of GGML's formats, by its name."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def fingerprint(self) -> str:
        """A stable id of the configuration and the weights, the same for every copy of the same files."""

    def tensor(self, name: str, order: Tensor | None = None) -> Tensor | BlockTensor:
        """The tensor of that Hugging Face name, for instance "model.layers.0.self_attn.q_proj.weight".

        `order` reorders its rows (the elements of a vector). It may be a view of the file: do not write to
        it. Raises CorruptCheckpoint when it is missing or unreadable, UnsupportedModel when its element type
        is not supported.
        """

    def release(self) -> None:
        """Let go of the memory that reading tensors took. They can be read again."""

    def tokenizer_files(self) -> TokenizerFiles:
        """The tokenizer that came with the weights. Raises UnsupportedModel, CorruptCheckpoint."""


def open_checkpoint(path: Path | str) -> Checkpoint:
    """The checkpoint at `path`: a GGUF file, a directory with one, or a directory with config.json.

    Of a GGUF model that is split into parts any part may be named.
    Raises ModelNotFound, CorruptCheckpoint or UnsupportedModel, saying what was found and what was expected.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _open_directory(path)
        with path.open("rb") as file:
            magic = file.read(len(_GGUF_MAGIC))
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a null byte in the path
        raise ModelNotFound(f"{str(path)!r} is not a path: {error}") from error
    if magic == _GGUF_MAGIC or path.suffix == ".gguf":
        return _open_gguf(path)
    raise ModelNotFound(
        f"{path} is not a GGUF file; give a .gguf file or a directory with config.json and safetensors"
    )


def _open_directory(directory: Path) -> Checkpoint:
    if (directory / "config.json").is_file():
        return SafetensorsDirectory(directory)
    found = models_in(file.name for file in directory.iterdir())
    if len(found) == 1:
        return _open_gguf(directory / found[0].first)
    if found:
        names = ", ".join(model.first for model in found)
        raise ModelNotFound(
            f"{directory} holds several models, name one of them: {names}; or its quant as {directory}:TAG"
        )
    raise ModelNotFound(f"{directory} holds neither a config.json nor a .gguf file")


def _open_gguf(path: Path) -> Checkpoint:
    from kakeya.models.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(path)

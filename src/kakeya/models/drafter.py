"""A trained drafter's file: a small network that reads a verifier's hidden states and guesses what comes.

Each position gets a *feature*: the outputs of a few layers of the verifier, put together by one matmul. The
features of the history are the keys and values that the drafter attends to. It starts from the feature of the
newest computed position and from the newest token, and shares embedding and head with the verifier. Of the
head it has the rows of its *draft vocabulary*: the tokens that it can guess.

    state = feature(position)
    layer: state += attention([norm(embedding(token)), norm(state)]; history, draft so far)
           state += mlp(norm(state))
    next token = head(norm(state))

"steps" goes on from its own state and the token that it just guessed. "block" fills a whole block in one
pass: in place of tokens that it does not know yet it has a learned vector for each place.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kakeya.errors import CorruptCheckpoint, ModelNotFound
from kakeya.models.config import ModelConfig
from kakeya.models.stable_safetensors import save_stable

FORMAT = "kakeya-drafter"
VERSION = "2"
_READ = ("1", VERSION)  # the first one had no draft vocabulary: all tokens could be guessed
_DRAFT_VOCAB = "draft_vocab"
_SCALE = ".scale"

DrafterKind = Literal["steps", "block"]


@dataclass(frozen=True)
class DrafterConfig:
    """The shape of a drafter. Its heads are the verifier's, so that a slab holds its keys and values."""

    kind: DrafterKind
    taps: tuple[int, ...]
    """The layers of the verifier whose outputs make a feature, counted from 0."""
    block: int
    """The most tokens of a draft."""
    layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    """How many tokens it can guess: all, or some that the verifier says often."""
    norm_eps: float
    verifier: str
    """The fingerprint of the checkpoint that it was trained for."""

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor by name. Matrices are [outputs, inputs]; norms and biases are float32 vectors."""
        n, inner, queries = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fuse.weight": (n, len(self.taps) * n),
            "fuse.bias": (n,),
            "final_norm": (n,),
        }
        if self.kind == "block":
            shapes["unknown"] = (self.block - 1, n)
        for index in range(self.layers):
            layer = {
                "history_norm": (n,),
                "history_kv": (2 * self.kv_size, n),  # keys first
                "token_norm": (n,),
                "state_norm": (n,),
                "qkv": (queries + 2 * self.kv_size, 2 * n),  # of the token first, then of the state
                "output": (n, queries),
                "mlp_norm": (n,),
                "gate_up": (2 * inner, n),  # gate first
                "down": (n, inner),
            }
            shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        return shapes

    def check_fits(self, model: ModelConfig) -> None:
        """Raise CorruptCheckpoint if a model of this shape cannot have such a drafter, saying why."""
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size"):
            mine, its = getattr(self, name), getattr(model, name)
            if mine != its:
                raise CorruptCheckpoint(f"the drafter is for a model with {name} {mine}, this one has {its}")
        if model.layer_heads:
            raise CorruptCheckpoint(f"a drafter for {model.family} is not possible: its layers' heads differ")
        if self.taps[-1] >= model.num_layers:
            raise CorruptCheckpoint(
                f"the drafter reads layer {self.taps[-1]}, and the model has {model.num_layers}, from 0 on"
            )


def drafter_rope(model: ModelConfig) -> int:
    """The layer of the verifier whose RoPE a drafter has: the first that rotates and sees all of a window."""
    layers = enumerate(zip(model.layer_ropes, model.layer_windows, strict=True))
    return next((index for index, (rope, local) in layers if local is None and rope.rotary_dim), 0)


@dataclass(frozen=True)
class StoredDrafter:
    """A drafter as its file has it."""

    config: DrafterConfig
    tensors: Mapping[str, Tensor]
    draft_vocab: Tensor
    """The ids that it can guess, int64, ascending."""
    notes: Mapping[str, str]
    """What its makers wrote down: the command, the licence, the measured acceptance."""
    digest: str


def write_drafter(
    path: Path,
    config: DrafterConfig,
    tensors: Mapping[str, Tensor],
    draft_vocab: Tensor,
    notes: Mapping[str, str],
) -> None:
    """Write matrices in 8 bits, with a scale for each row, and vectors as float32.

    The same drafter and notes are the same bytes.
    """
    held = {_DRAFT_VOCAB: draft_vocab.to("cpu", torch.int32)}
    for name, shape in config.shapes.items():
        tensor = tensors[name].detach().to("cpu", torch.float32)
        if len(shape) == 2:
            scale = (tensor.abs().amax(1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
            held[name + _SCALE] = scale
            tensor = (tensor / scale[:, None]).round().to(torch.int8)
        held[name] = tensor.contiguous()
    metadata = {"format": FORMAT, "version": VERSION, "config": json.dumps(asdict(config)), **notes}
    save_stable(path, held, metadata)


def read_drafter(path: Path) -> StoredDrafter:
    """Read and check a drafter. Raises ModelNotFound, CorruptCheckpoint."""
    if not path.is_file():
        raise ModelNotFound(f"there is no drafter at {path}")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read as a drafter: {error}") from error
    if metadata.pop("format", None) != FORMAT or metadata.pop("version", None) not in _READ:
        raise CorruptCheckpoint(f"{path} is not a {FORMAT} file of version {' or '.join(_READ)}")
    config = _parse_config(path, metadata.pop("config", ""))
    whole = {name: _whole(path, tensors, name, shape) for name, shape in config.shapes.items()}
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return StoredDrafter(config, whole, _draft_vocab(path, tensors, config), metadata, digest)


def _draft_vocab(path: Path, tensors: Mapping[str, Tensor], config: DrafterConfig) -> Tensor:
    ids = tensors.get(_DRAFT_VOCAB, torch.arange(config.vocab_size)).long()
    count, vocab = config.draft_vocab_size, config.vocab_size
    is_ascending = bool((ids.diff() > 0).all())
    if count != len(ids) or not count or not is_ascending or ids[0] < 0 or ids[-1] >= vocab:
        raise CorruptCheckpoint(f"{path}: {_DRAFT_VOCAB} must be {count} ascending ids below {vocab}")
    return ids


def _whole(path: Path, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    """The tensor as float32. Raises CorruptCheckpoint if it or its scales are not what they must be."""
    _check(path, tensors, name, shape)
    if len(shape) == 1:
        return tensors[name].float()
    _check(path, tensors, name + _SCALE, shape[:1])
    return tensors[name].float() * tensors[name + _SCALE][:, None]


def _check(path: Path, tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> None:
    if name not in tensors or tuple(tensors[name].shape) != shape:
        found = tuple(tensors[name].shape) if name in tensors else "missing"
        raise CorruptCheckpoint(f"{path}: tensor {name} must have shape {shape}, it is {found}")


def _parse_config(path: Path, text: str) -> DrafterConfig:
    try:
        values = json.loads(text)
        values["taps"] = tuple(values["taps"])
        values.setdefault("draft_vocab_size", values["vocab_size"])
        config = DrafterConfig(**{field.name: values[field.name] for field in fields(DrafterConfig)})
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptCheckpoint(f"{path}: the drafter's configuration is damaged: {error!r}") from error
    if config.kind not in ("steps", "block") or not config.taps or list(config.taps) != sorted(config.taps):
        raise CorruptCheckpoint(f"{path}: a drafter is 'steps' or 'block' and has ascending taps: {config}")
    return config

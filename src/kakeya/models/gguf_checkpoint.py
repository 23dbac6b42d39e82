"""A GGUF file as a Checkpoint: its names, row order and tokenizer turned into the common ones."""

import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

from torch import Tensor

from kakeya.errors import CorruptCheckpoint
from kakeya.models import gguf_blocks
from kakeya.models.blocks import BlockTensor
from kakeya.models.config import FAMILIES, ModelConfig
from kakeya.models.fingerprint import fingerprint
from kakeya.models.gguf_config import config_from_gguf
from kakeya.models.gguf_file import GgufFile
from kakeya.models.gguf_rope import DIVISOR_TENSORS
from kakeya.models.row_order import reordered
from kakeya.types import TokenizerFiles

_EMBEDDING = "token_embd"
_OUTER_NAMES = {"model.embed_tokens": _EMBEDDING, "model.norm": "output_norm", "lm_head": "output"}
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
}
# With norms after each block the same words mean other places.
_POST_NORM_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "layer_scalar": "layer_output_scale",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class GgufCheckpoint:
    """Implements checkpoint.Checkpoint for a GGUF model. Raises what GgufFile and config_from_gguf raise."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = GgufFile(path)
        self.config: ModelConfig = self._config()

    @cached_property
    def fingerprint(self) -> str:
        tensors = self._file.tensors.values()
        return fingerprint(
            self.config,
            (
                (item.name, f"{item.kind.name} {item.shape}", self._file.raw(item.name).flatten())
                for item in tensors
            ),
        )

    @property
    def files(self) -> tuple[Path, ...]:
        return self._file.files

    @property
    def matrix_elements(self) -> Mapping[str, int]:
        elements: Counter[str] = Counter()
        for entry in self._file.tensors.values():
            if len(entry.shape) > 1:
                elements[entry.kind.name] += math.prod(entry.shape)
        return elements

    def release(self) -> None:
        self._file.release()

    def tokenizer_files(self) -> TokenizerFiles:
        # Only text front ends pay for the tokenizer library.
        from kakeya.models.kept_tokenizer import kept_tokenizer_files

        return kept_tokenizer_files(self._file.metadata_digest(), self._file.metadata)

    def tensor(self, name: str, order: Tensor | None = None) -> Tensor | BlockTensor:
        stored = self._stored_name(name)
        if stored not in self._file.tensors:
            raise CorruptCheckpoint(f"{self.path}: tensor {stored} ({name}) is missing")
        raw = self._file.raw(stored)
        entry = self._file.tensors[stored]
        if len(entry.shape) > 1:
            return gguf_blocks.decode(entry, self._in_order(name, raw, order))
        vector = gguf_blocks.decode(entry, raw)
        assert isinstance(vector, Tensor)
        return self._in_order(name, vector, order)

    def _in_order(self, name: str, rows: Tensor, order: Tensor | None) -> Tensor:
        """Rows in the order of other files, then in the order that was asked for."""
        heads = self._interleaved_heads(name)
        if heads is not None:
            if rows.shape[0] % (2 * heads):
                raise CorruptCheckpoint(
                    f"{self.path}: {self._stored_name(name)} has {rows.shape[0]} rows, "
                    f"which {heads} heads cannot share"
                )
            rows = _half_split(rows, heads)
        return rows if order is None else reordered(name, rows, order)

    def _config(self) -> ModelConfig:
        tensors = self._file.tensors
        if f"{_EMBEDDING}.weight" not in tensors:
            raise CorruptCheckpoint(f"{self.path}: tensor {_EMBEDDING}.weight is missing")
        divisors = {name: self._numbers(name) for name in DIVISOR_TENSORS if f"{name}.weight" in tensors}
        vocab_size = tensors[f"{_EMBEDDING}.weight"].shape[0]
        return config_from_gguf(self._file.metadata, vocab_size, tensors.keys(), divisors)

    def _numbers(self, name: str) -> tuple[float, ...]:
        """A small tensor that is part of the configuration."""
        stored = gguf_blocks.decode(self._file.tensors[f"{name}.weight"], self._file.raw(f"{name}.weight"))
        assert isinstance(stored, Tensor)
        return tuple(stored.float().flatten().tolist())

    def _stored_name(self, name: str) -> str:
        if name.endswith(".layer_scalar"):  # the one parameter that is no weight of something
            name = name.replace("layer_scalar", "layer_scalar.weight")
        stem, _, suffix = name.rpartition(".")
        layer = _LAYER.fullmatch(stem)
        if layer is None:
            return f"{_OUTER_NAMES[stem]}.{suffix}"
        names = _POST_NORM_LAYER_NAMES if self.config.post_norms else _LAYER_NAMES
        return f"blk.{layer[1]}.{names[layer[2]]}.{suffix}"

    def _interleaved_heads(self, name: str) -> int | None:
        """How many heads the tensor's rows make up, if they are stored for interleaved rotary pairs."""
        if not FAMILIES[self.config.family].gguf_interleaved:
            return None
        if ".q_proj." in name:
            return self.config.num_heads
        return self.config.num_kv_heads if ".k_proj." in name else None


def _half_split(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head from pair order (0, half, 1, half + 1, …) to (0, 1, …, half, half + 1, …)."""
    paired = rows.view(heads, rows.shape[0] // heads // 2, 2, -1)
    return paired.transpose(1, 2).reshape(rows.shape)

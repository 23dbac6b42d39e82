"""What a decoder looks like, whatever file it came from."""

from dataclasses import dataclass
from typing import Literal

from kakeya.errors import CorruptCheckpoint, UnsupportedModel
from kakeya.models.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class Family:
    """What every checkpoint of a family has in common and its config file does not say."""

    name: str
    qkv_bias: bool = False
    qk_norm: bool = False
    gemma: bool = False  # post norms, scaled embeddings, 1 + w norms, tied head, GELU
    local_pattern: int | None = None  # every n-th layer is global, the others are local


FAMILIES = {
    family.name: family
    for family in (
        Family("llama"),
        Family("mistral"),
        Family("qwen2", qkv_bias=True),
        Family("qwen3", qk_norm=True),
        Family("gemma2", gemma=True, local_pattern=2),
        Family("gemma3", gemma=True, qk_norm=True, local_pattern=6),
    )
}


def unsupported_architecture(name: str) -> UnsupportedModel:
    known = ", ".join(FAMILIES)
    return UnsupportedModel(f"architecture {name!r} is not supported; supported families: {known}")


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
)


@dataclass(frozen=True)
class ModelConfig:
    """One decoder network. Complete and consistent once constructed: raises CorruptCheckpoint otherwise."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    norm_offset: float  # added to every stored norm weight
    activation: Activation
    attention_bias: bool  # on q, k and v
    output_bias: bool  # on the attention's output product
    mlp_bias: bool
    qk_norm: bool
    post_norms: bool
    tied_head: bool
    embed_scale: float
    query_scale: float  # attention scores are multiplied by this
    attention_softcap: float | None
    logit_softcap: float | None
    layer_windows: tuple[int | None, ...]  # a layer's own local span, the token itself included
    layer_ropes: tuple[RopeConfig, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    max_positions: int

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise CorruptCheckpoint(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise CorruptCheckpoint(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise CorruptCheckpoint(f"head_dim must be even for rotary pairs, got {self.head_dim}")
        for name in ("layer_windows", "layer_ropes"):
            if len(getattr(self, name)) != self.num_layers:
                count = len(getattr(self, name))
                raise CorruptCheckpoint(
                    f"{name} must have one entry for each of {self.num_layers} layers, got {count}"
                )
        self._check_ranges()

    def _check_ranges(self) -> None:
        for window in self.layer_windows:
            if window is not None and window < 1:
                raise CorruptCheckpoint(f"a local attention window must be at least 1, got {window}")
        for name in ("norm_eps", "query_scale", "attention_softcap", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise CorruptCheckpoint(f"{name} must be positive, got {value}")
        for token in (*self.eos_token_ids, *([self.bos_token_id] if self.bos_token_id is not None else [])):
            if not 0 <= token < self.vocab_size:
                raise CorruptCheckpoint(f"token id {token} is outside the vocabulary of {self.vocab_size}")

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

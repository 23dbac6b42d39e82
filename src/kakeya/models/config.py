"""What a decoder looks like, whatever file it came from."""

from dataclasses import dataclass
from typing import Literal

from kakeya.errors import CorruptCheckpoint, UnsupportedModel
from kakeya.models.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh"]
QkNorm = Literal["head", "width"]  # each head on its own, or all heads of a row together


@dataclass(frozen=True)
class Family:
    """What every checkpoint of a family has in common and its config file does not say."""

    name: str
    qkv_bias: bool = False
    qk_norm: QkNorm | None = None
    gemma: bool = False  # post norms, scaled embeddings, 1 + w norms, tied head, GELU
    pre_norms: bool = True
    post_norms: bool = False
    fused: bool = False  # one tensor for q, k and v, and one for gate and up
    tied: bool = False  # when the file does not say
    theta: float = 10_000.0  # when the file does not say
    local_pattern: int | None = None  # every n-th layer is global, the others are local
    unrotated_pattern: int | None = None  # every n-th layer has no positions
    gguf_name: str | None = None  # the architecture of its GGUF files; None: its own name
    gguf_interleaved: bool = False  # rotary pairs are neighbours there, not half a head apart


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", gguf_interleaved=True),
        Family("mistral", gguf_name="llama", gguf_interleaved=True),
        Family("ministral3", theta=1e6, gguf_name="mistral3", gguf_interleaved=True),
        Family("qwen2", qkv_bias=True),
        Family("qwen3", qk_norm="head"),
        Family("phi3", fused=True),
        Family("smollm3", tied=True, theta=2e6, unrotated_pattern=4, gguf_interleaved=True),
        Family("olmo2", qk_norm="width", pre_norms=False, post_norms=True),
        Family(
            "olmo3",
            qk_norm="width",
            pre_norms=False,
            post_norms=True,
            theta=5e5,
            local_pattern=4,
            gguf_name="olmo2",
        ),
        Family("granite", gguf_interleaved=True),
        Family("gemma2", gemma=True, post_norms=True, tied=True, local_pattern=2),
        Family("gemma3", gemma=True, qk_norm="head", post_norms=True, tied=True, local_pattern=6),
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
class QueryTemperature:
    """Queries grow by 1 + beta * ln(1 + floor(t / positions)), t being the position a query is seen at: below
    `positions` not at all."""

    beta: float
    positions: int


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
    qk_norm: QkNorm | None
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
    pre_norms: bool = True
    fused_projections: bool = False  # one tensor for q, k and v, and one for gate and up
    logit_scale: float = 1.0  # logits are multiplied by this
    query_temperature: QueryTemperature | None = None

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
        for name in ("norm_eps", "query_scale", "attention_softcap", "logit_softcap", "logit_scale"):
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

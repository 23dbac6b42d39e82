"""The configuration of a decoder, whatever file it came from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kakeya.errors import CorruptCheckpoint, UnsupportedModel
from kakeya.models.fields import Fields
from kakeya.models.rope import RopeConfig

Activation = Literal["silu", "gelu_tanh"]
QkNorm = Literal["head", "width"]  # each head on its own, or all heads of a row together


@dataclass(frozen=True)
class Family:
    """What all checkpoints of a family have in common and their config files do not say."""

    name: str
    qkv_bias: bool = False
    qk_norm: QkNorm | None = None
    gemma: bool = False  # scaled embeddings, GELU
    norm_offset: float = 0.0  # added to norm weights; GGUF files have it in them already
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
        Family("gemma2", gemma=True, norm_offset=1.0, post_norms=True, tied=True, local_pattern=2),
        Family(
            "gemma3",
            gemma=True,
            norm_offset=1.0,
            qk_norm="head",
            post_norms=True,
            tied=True,
            local_pattern=6,
        ),
        Family("gemma4", gemma=True, qk_norm="head", post_norms=True, tied=True, local_pattern=6),
    )
}


NO_EXPERTS = "this network has no router for a mixture of experts"
_NO_STATE = "a recurrent state cannot be evicted token by token"
# Why a network that is not among the families cannot be bounded or computed, by words in its name. What
# has both a state and experts is told of the state.
_WHY_NOT = {
    _NO_STATE: (
        "mamba",
        "rwkv",
        "jamba",
        "hybrid",
        "bamba",
        "qwen3_next",
        "qwen3next",
        "lfm2",
        "falcon_h1",
        "nemotron_h",
    ),
    NO_EXPERTS: ("moe", "mixtral", "gpt_oss", "deepseek", "llama4", "dbrx"),
    "it has an embedding for each layer, and layers that share keys": ("gemma3n",),
}


def why_unsupported(name: str) -> str | None:
    """Why a network of that name cannot be run; None where that is not known."""
    words = name.lower().replace("-", "_")
    why = (reason for reason, parts in _WHY_NOT.items() if any(part in words for part in parts))
    return next(why, None)


def unsupported_architecture(name: str) -> UnsupportedModel:
    known, why = ", ".join(FAMILIES), why_unsupported(name)
    reason = "" if why is None else f": {why}"
    return UnsupportedModel(f"architecture {name!r} is not supported{reason}; supported families: {known}")


@dataclass(frozen=True)
class LayerHeads:
    """The key heads of one layer; its queries have as many heads as those of every layer."""

    kv_heads: int
    head_dim: int
    values_are_keys: bool = False  # before either is normed


def refuse_gemma4_small(source: str, per_layer_size: int, shared_layers: int) -> None:
    """Raises UnsupportedModel for E2B and E4B, naming what they have and we do not."""
    if per_layer_size:
        raise UnsupportedModel(
            f"{source}: Gemma 4 with an embedding for each layer ({per_layer_size} numbers a token) is not "
            "supported: that table is larger than the rest of the model and would have to stay in the file"
        )
    if shared_layers:
        raise UnsupportedModel(
            f"{source}: Gemma 4 whose last {shared_layers} layers attend to the keys of earlier ones "
            "is not supported: each layer of a slab holds its own"
        )


def granite_scale(fields: Fields, family: Family, name: str) -> float:
    """One of Granite's numbers; 1 where the file has none, and for every other family."""
    return fields.positive(name, 1.0) if family.name == "granite" else 1.0


def slab_heads(layer_heads: Sequence[LayerHeads], kv_heads: int, head_dim: int) -> int:
    """How many key heads of `head_dim` a layer of a slab has room for: as many as the largest layer needs."""
    largest = max((each.kv_heads * each.head_dim for each in layer_heads), default=kv_heads * head_dim)
    if largest % max(head_dim, 1):
        raise UnsupportedModel(f"heads of {head_dim} do not fill a slab of {largest} numbers a token")
    return largest // max(head_dim, 1)


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
    """Queries at position t are multiplied by 1 + beta * ln(1 + floor(t / positions))."""

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
    output_bias: bool  # on the attention's output projection
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
    # Where layers differ, num_kv_heads and head_dim are those of a slab, and each layer has as many key heads
    # as fill it: a whole number of copies of its own.
    layer_heads: tuple[LayerHeads, ...] = ()
    value_norm: bool = False  # each head of a value is normed, without a weight
    layer_scalars: bool = False  # a layer's output is multiplied by a number of its own
    fused_gate_up: bool = False  # one tensor for gate and up, also where q, k and v have their own

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                raise CorruptCheckpoint(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads and not self.layer_heads:
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
        self._check_layer_heads()
        self._check_ranges()

    def _check_layer_heads(self) -> None:
        if self.layer_heads and len(self.layer_heads) != self.num_layers:
            raise CorruptCheckpoint(f"layer_heads must have {self.num_layers} entries")
        for heads in self.layer_heads:
            copied = heads.kv_heads * self.kv_copies(heads)
            if copied * heads.head_dim != self.kv_size or self.num_heads % copied:
                raise UnsupportedModel(
                    f"{heads.kv_heads} key heads of {heads.head_dim} do not fit a slab of "
                    f"{self.num_kv_heads} of {self.head_dim} with {self.num_heads} query heads"
                )

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

    def heads_of(self, layer: int) -> LayerHeads:
        if self.layer_heads:
            return self.layer_heads[layer]
        return LayerHeads(self.num_kv_heads, self.head_dim)

    def kv_copies(self, heads: LayerHeads) -> int:
        """How often such key heads lie in a slab."""
        return max(1, self.kv_size // (heads.kv_heads * heads.head_dim))

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

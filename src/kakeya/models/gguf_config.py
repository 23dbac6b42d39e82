"""ModelConfig from the metadata of a GGUF file."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from kakeya.errors import UnsupportedModel
from kakeya.models.config import FAMILIES, Family, ModelConfig, unsupported_architecture
from kakeya.models.fields import Fields
from kakeya.models.rope import (
    DivisorScaling,
    LinearScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)

SOURCE = "GGUF metadata"

# End-of-turn tokens that chat models emit but some files do not name as their end token.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
_CONTROL_TOKEN = 3  # token_type of special tokens
# GGUF does not store Gemma's query_pre_attn_scalar; only these sizes differ from head_dim. family -> layers
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def config_from_gguf(
    metadata: Mapping[str, Any],
    vocab_size: int,
    tensor_names: Collection[str],
    rope_divisors: Sequence[float] | None,
) -> ModelConfig:
    """`vocab_size` is the embedding table's row count and `rope_divisors` the rope_freqs tensor's numbers.

    Raises UnsupportedModel for a network that is refused, CorruptCheckpoint for missing or senseless values.
    """
    architecture = Fields(metadata, SOURCE).text("general.architecture")
    if architecture not in FAMILIES or architecture == "mistral":
        raise unsupported_architecture(architecture)
    family = FAMILIES[architecture]
    fields = _own_fields(metadata, architecture)
    _refuse_features(fields)
    hidden, heads = fields.integer("embedding_length"), _uniform(fields, "attention.head_count")
    head_dim = fields.integer("attention.key_length", hidden // max(heads, 1))
    _refuse_partial_rotary(fields, head_dim)
    layers = fields.layer_count("block_count")
    windows = _layer_windows(fields, family, layers)
    return ModelConfig(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=_uniform(fields, "feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_uniform(fields, "attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        norm_offset=0.0,  # the converter has added Gemma's 1 already
        activation="gelu_tanh" if family.gemma else "silu",
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        qk_norm=family.qk_norm,
        post_norms=family.gemma,
        tied_head="output.weight" not in tensor_names,
        embed_scale=hidden**0.5 if family.gemma else 1.0,
        query_scale=_query_scale(fields, family, layers, hidden // max(heads, 1), head_dim),
        attention_softcap=_softcap(fields, family, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(fields, family, "final_logit_softcapping", 30.0),
        layer_windows=windows,
        layer_ropes=_layer_ropes(fields, family, windows, head_dim, rope_divisors),
        bos_token_id=Fields(metadata, SOURCE).maybe_integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(metadata),
        max_positions=fields.integer("context_length"),
    )


def _own_fields(metadata: Mapping[str, Any], architecture: str) -> Fields:
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return Fields(own, f"{SOURCE}, {architecture}")


def _refuse_features(fields: Fields) -> None:
    if fields.integer("expert_count", 0):
        raise UnsupportedModel(
            f"{SOURCE}: mixture of experts ({fields.integer('expert_count')} experts) is not supported"
        )


def _refuse_partial_rotary(fields: Fields, head_dim: int) -> None:
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModel(
            f"{SOURCE}: partial rotary ({rotated} of {head_dim} dimensions) is not supported"
        )
    value_length = fields.integer("attention.value_length", head_dim)
    if value_length != head_dim:
        raise UnsupportedModel(
            f"{SOURCE}: values of {value_length} dimensions beside keys of {head_dim} are not supported"
        )


def _uniform(fields: Fields, name: str, default: int | None = None) -> int:
    """A number that GGUF may also store as one per layer; they must all be the same."""
    value = fields.raw(name)
    if isinstance(value, list) and value:
        if len(set(value)) > 1:
            raise UnsupportedModel(f"{SOURCE}: {name} that differs between layers is not supported")
        return Fields({name: value[0]}, SOURCE).integer(name)
    return fields.integer(name, default)


def _query_scale(fields: Fields, family: Family, layers: int, hidden_per_head: int, head_dim: int) -> float:
    stated = fields.maybe_number("attention.scale")
    if stated:
        return stated
    divided = hidden_per_head if _GEMMA_27B_LAYERS.get(family.name) == layers else head_dim
    return float(max(divided, 1) ** -0.5)


def _softcap(fields: Fields, family: Family, name: str, gemma2_default: float) -> float | None:
    if family.name == "gemma2":
        return fields.number(name, gemma2_default)
    return fields.maybe_number(name)


def _layer_windows(fields: Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    window = fields.integer("attention.sliding_window", 0) or None
    pattern = family.local_pattern
    if pattern is None:
        return (window,) * layers
    return tuple(window if (layer + 1) % pattern else None for layer in range(layers))


def _layer_ropes(
    fields: Fields,
    family: Family,
    windows: tuple[int | None, ...],
    head_dim: int,
    divisors: Sequence[float] | None,
) -> tuple[RopeConfig, ...]:
    rope = RopeConfig(fields.number("rope.freq_base", 10_000.0), head_dim, _scaling(fields, divisors))
    if family.name != "gemma3":
        return (rope,) * len(windows)
    local = RopeConfig(fields.number("rope.freq_base_swa", 10_000.0), head_dim)
    pattern = family.local_pattern or 1
    return tuple(local if (layer + 1) % pattern else rope for layer in range(len(windows)))


def _scaling(fields: Fields, divisors: Sequence[float] | None) -> RopeScaling | None:
    if divisors is not None:
        return DivisorScaling(tuple(divisors))
    kind = fields.text("rope.scaling.type", "none")
    if kind == "none" and "rope.scale_linear" in fields:
        return LinearScaling(fields.number("rope.scale_linear"))
    match kind:
        case "none":
            return None
        case "linear":
            return LinearScaling(fields.number("rope.scaling.factor"))
        case "yarn":
            return _yarn(fields)
    raise UnsupportedModel(
        f"{SOURCE}: RoPE scaling {kind!r} is not supported; supported: linear, yarn, rope_freqs"
    )


def _yarn(fields: Fields) -> YarnScaling:
    factor = fields.number("rope.scaling.factor")
    stated = fields.number("rope.scaling.yarn_attn_factor", fields.number("rope.scaling.attn_factor", 1.0))
    return YarnScaling(
        factor=factor,
        original_positions=fields.integer(
            "rope.scaling.original_context_length", fields.integer("context_length")
        ),
        attention_factor=stated * yarn_attention_factor(factor),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def _eos_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    fields = Fields(metadata, SOURCE)
    named = [fields.maybe_integer(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    tokens = fields.sequence("tokenizer.ggml.tokens", str) or []
    kinds = fields.sequence("tokenizer.ggml.token_type", int) or []
    end_of_turn = [
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL_TOKEN and token in _END_OF_TURN
    ]
    return tuple(dict.fromkeys(token for token in (*named, *end_of_turn) if token is not None))

"""ModelConfig from a Hugging Face config.json: today's spelling and the older ones."""

from collections.abc import Mapping
from typing import Any

from kakeya.errors import CorruptCheckpoint, UnsupportedModel
from kakeya.models.config import FAMILIES, Activation, Family, ModelConfig, unsupported_architecture
from kakeya.models.fields import Fields
from kakeya.models.rope import (
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)

SOURCE = "config.json"

# model_type of the text part -> family
_MODEL_TYPES = {name: name for name in FAMILIES} | {"gemma3_text": "gemma3"}
# Published Gemma 3 files leave out of text_config whatever equals these.
_GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
# Keys whose presence (with a value other than the harmless ones) means a network this decoder is not.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "num_experts": (0,),
    "num_local_experts": (0,),
    "n_routed_experts": (0,),
    "partial_rotary_factor": (1.0, 1),
    "rotary_pct": (1.0, 1),
    "quantization_config": (),
    "use_bidirectional_attention": (False,),
    "is_encoder_decoder": (False,),
}


def config_from_hf(raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """The config.json `raw`, with generation_config.json's end tokens.

    Raises UnsupportedModel for a network that is refused, CorruptCheckpoint for missing or senseless values.
    """
    outer = Fields(raw, SOURCE)
    fields, family = _text_part(outer)
    _refuse_features(outer)
    _refuse_features(fields)
    heads = fields.integer("num_attention_heads")
    hidden = fields.integer("hidden_size")
    head_dim = _head_dim(fields, family, hidden, heads)
    layers = fields.layer_count("num_hidden_layers")
    layer_types = _layer_types(fields, family, layers)
    declared_bias = fields.flag("attention_bias", False)
    return ModelConfig(
        family=family.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=fields.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_offset=1.0 if family.gemma else 0.0,
        activation=_activation(fields, family),
        attention_bias=family.qkv_bias or declared_bias,
        output_bias=declared_bias and not family.qkv_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        post_norms=family.gemma,
        tied_head=_tied(outer, fields, family),
        embed_scale=hidden**0.5 if family.gemma else 1.0,
        query_scale=_query_scale(fields, family, head_dim),
        attention_softcap=_softcap(fields, family, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(fields, family, "final_logit_softcapping", 30.0),
        layer_windows=_layer_windows(fields, family, layer_types),
        layer_ropes=_layer_ropes(fields, family, layer_types, head_dim),
        bos_token_id=next(iter(_tokens("bos_token_id", generation, outer, fields)), None),
        eos_token_ids=_tokens("eos_token_id", generation, outer, fields),
        max_positions=fields.integer("max_position_embeddings"),
    )


def _text_part(outer: Fields) -> tuple[Fields, Family]:
    """The fields that describe the text decoder, and its family."""
    nested = outer.section("text_config")
    fields = nested or outer
    model_type = fields.maybe_text("model_type") or outer.text("model_type")
    if model_type not in _MODEL_TYPES:
        raise unsupported_architecture(model_type)
    family = FAMILIES[_MODEL_TYPES[model_type]]
    if family.name == "gemma3":
        return fields.with_defaults(_GEMMA3_DEFAULTS), family
    if nested is not None:
        raise unsupported_architecture(f"{outer.maybe_text('model_type')} with a {model_type} text_config")
    return fields, family


def _refuse_features(fields: Fields) -> None:
    for name, harmless in _REFUSED.items():
        value = fields.raw(name)
        if value is not None and value not in harmless:
            described = value.get("quant_method", "unnamed") if isinstance(value, Mapping) else value
            raise UnsupportedModel(f"{SOURCE}: {name} = {described!r} is not supported")


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    stated = fields.maybe_integer("head_dim")
    if stated is not None and stated < 1:
        raise CorruptCheckpoint(f"{SOURCE}: head_dim must be at least 1, got {stated}")
    if stated is not None:
        return stated
    if family.name == "qwen3":
        return 128
    if heads < 1 or hidden % heads:
        raise CorruptCheckpoint(
            f"{SOURCE}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}"
        )
    return hidden // heads


def _activation(fields: Fields, family: Family) -> Activation:
    if family.gemma:
        # hidden_act in Gemma files is a leftover that transformers ignores too.
        name = fields.text("hidden_activation", "gelu_pytorch_tanh")
    else:
        name = fields.text("hidden_act", "silu")
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{SOURCE}: activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _tied(outer: Fields, fields: Fields, family: Family) -> bool:
    if "tie_word_embeddings" in fields:
        return fields.flag("tie_word_embeddings", family.gemma)
    return outer.flag("tie_word_embeddings", family.gemma)


def _query_scale(fields: Fields, family: Family, head_dim: int) -> float:
    scalar = fields.number("query_pre_attn_scalar", 256) if family.gemma else float(head_dim)
    if scalar <= 0:
        raise CorruptCheckpoint(f"{SOURCE}: query_pre_attn_scalar must be positive, got {scalar}")
    return float(scalar**-0.5)


def _softcap(fields: Fields, family: Family, name: str, gemma2_default: float) -> float | None:
    if not family.gemma:
        return None
    if family.name == "gemma2" and name not in fields:
        return gemma2_default
    return fields.maybe_number(name)


def _layer_types(fields: Fields, family: Family, layers: int) -> tuple[str, ...]:
    """'sliding_attention' or 'full_attention' for each layer."""
    stated = fields.sequence("layer_types", str)
    if stated is not None and family.name not in ("llama", "mistral"):
        unknown = set(stated) - {"sliding_attention", "full_attention"}
        if unknown:
            raise UnsupportedModel(f"{SOURCE}: layer type {sorted(unknown)[0]!r} is not supported")
        return tuple(stated)
    local = "sliding_attention"
    if family.name == "mistral":
        return (local,) * layers
    if family.name in ("qwen2", "qwen3"):
        first_local = fields.integer("max_window_layers", 28)
        return tuple(local if layer >= first_local else "full_attention" for layer in range(layers))
    pattern = fields.integer("sliding_window_pattern", family.local_pattern or 1)
    if pattern < 1:
        raise CorruptCheckpoint(f"{SOURCE}: sliding_window_pattern must be at least 1, got {pattern}")
    return tuple(local if (layer + 1) % pattern else "full_attention" for layer in range(layers))


def _layer_windows(fields: Fields, family: Family, layer_types: tuple[str, ...]) -> tuple[int | None, ...]:
    switched_off = family.name.startswith("qwen") and not fields.flag("use_sliding_window", False)
    absent = None if "sliding_window" in fields or family.name == "llama" else 4096
    window = None if switched_off else fields.maybe_integer("sliding_window") or absent
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _layer_ropes(
    fields: Fields, family: Family, layer_types: tuple[str, ...], head_dim: int
) -> tuple[RopeConfig, ...]:
    parameters = fields.section("rope_parameters")
    if parameters is not None and ("full_attention" in parameters or "sliding_attention" in parameters):
        by_type = {
            kind: _rope(fields, parameters.section(kind), _default_theta(family, kind), head_dim)
            for kind in set(layer_types)
        }
    else:
        scaling = parameters or fields.section("rope_scaling")
        theta = fields.number("rope_theta", _default_theta(family, "full_attention"))
        by_type = dict.fromkeys(layer_types, _rope(fields, scaling, theta, head_dim))
        if family.name == "gemma3":
            local = fields.number("rope_local_base_freq", _default_theta(family, "sliding_attention"))
            by_type["sliding_attention"] = RopeConfig(local, head_dim)
    return tuple(by_type[kind] for kind in layer_types)


def _default_theta(family: Family, kind: str) -> float:
    return 1_000_000.0 if family.name == "gemma3" and kind == "full_attention" else 10_000.0


def _rope(fields: Fields, parameters: Fields | None, default_theta: float, head_dim: int) -> RopeConfig:
    if parameters is None:
        return RopeConfig(default_theta, head_dim)
    _refuse_features(parameters)
    theta = parameters.number("rope_theta", default_theta)
    return RopeConfig(theta, head_dim, _scaling(fields, parameters))


def _scaling(fields: Fields, parameters: Fields) -> RopeScaling | None:
    kind = parameters.maybe_text("rope_type") or parameters.maybe_text("type") or "default"
    if "mrope_section" in parameters:
        kind = "mrope"
    original = parameters.integer(
        "original_max_position_embeddings", fields.integer("max_position_embeddings")
    )
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(parameters.number("factor"))
        case "llama3":
            low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
            return Llama3Scaling(parameters.number("factor"), low, high, original)
        case "yarn":
            return _yarn(parameters, original)
    raise UnsupportedModel(
        f"{SOURCE}: RoPE scaling {kind!r} is not supported; supported: linear, llama3, yarn"
    )


def _yarn(parameters: Fields, original: int) -> YarnScaling:
    factor = parameters.number("factor")
    recommended = yarn_attention_factor(
        factor, parameters.maybe_number("mscale"), parameters.maybe_number("mscale_all_dim")
    )
    return YarnScaling(
        factor=factor,
        original_positions=original,
        attention_factor=parameters.number("attention_factor", recommended),
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        truncate=parameters.flag("truncate", True),
    )


def _tokens(name: str, generation: Mapping[str, Any] | None, *configs: Fields) -> tuple[int, ...]:
    """The ids that any of the files names, without repeats; generation_config.json speaks first."""
    sources = (Fields(generation or {}, "generation_config.json"), *configs)
    return tuple(dict.fromkeys(token for source in sources for token in source.token_ids(name)))

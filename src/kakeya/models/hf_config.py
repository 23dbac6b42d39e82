"""ModelConfig from a Hugging Face config.json: today's spelling and the older ones."""

from collections.abc import Mapping
from typing import Any

from kakeya.errors import CorruptCheckpoint, UnsupportedModel
from kakeya.models.config import (
    FAMILIES,
    NO_EXPERTS,
    Activation,
    Family,
    LayerHeads,
    ModelConfig,
    granite_scale,
    refuse_gemma4_small,
    slab_heads,
    unsupported_architecture,
)
from kakeya.models.fields import Fields
from kakeya.models.hf_rope import GRANITE4, layer_ropes, query_temperature

SOURCE = "config.json"

# model_type of the text part -> family
_MODEL_TYPES = {name: name for name in FAMILIES} | {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    GRANITE4: "granite",
}
# Multimodal models whose text decoder is one of ours -> what it may be
_NESTED = {"gemma3": ("gemma3",), "gemma4": ("gemma4",), "mistral3": ("mistral", "ministral3")}
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
_GEMMA4_DEFAULTS: dict[str, Any] = _GEMMA3_DEFAULTS | {
    "vocab_size": 262_144,
    "num_hidden_layers": 30,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
# Granite 4's network can have recurrent layers and experts; these models have neither.
_GRANITE4_DEFAULTS: dict[str, Any] = {"num_local_experts": 8, "shared_intermediate_size": 1024}
# Families all of whose layers have the window that the file states, and those that never have one. In the
# others each layer has a type.
_ALL_LOCAL = ("mistral", "ministral3", "phi3")
_NEVER_LOCAL = ("llama", "granite", "olmo2")
# Families that have this window where the file does not speak of one.
_DEFAULT_WINDOW = dict.fromkeys(("mistral", "qwen2", "qwen3", "olmo3", "gemma2", "gemma3"), 4096)
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
    "rotary_pct": (1.0, 1),
    "quantization_config": (),
    "use_bidirectional_attention": (False, "vision"),  # between the parts of an image, and we read text
    "is_encoder_decoder": (False,),
}
_WHY_REFUSED = {
    "num_experts": NO_EXPERTS,
    "num_local_experts": NO_EXPERTS,
    "n_routed_experts": NO_EXPERTS,
    "quantization_config": "of quantized weights GGUF files alone are read",
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
    kv_heads = fields.integer("num_key_value_heads", heads)
    layer_heads = _layer_heads(fields, family, layer_types, LayerHeads(kv_heads, head_dim))
    declared_bias = fields.flag("attention_bias", False)
    # Granite adds each block's output times this. Hidden states that are all divided by it, and norms whose
    # epsilon is divided by its square, give the same logits without a multiplication.
    residual_scale = granite_scale(fields, family, "residual_multiplier")
    return ModelConfig(
        family=family.name,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=slab_heads(layer_heads, kv_heads, head_dim),
        head_dim=head_dim,
        norm_eps=fields.number("rms_norm_eps", 1e-6) / residual_scale**2,
        norm_offset=family.norm_offset,
        activation=_activation(fields, family),
        attention_bias=family.qkv_bias or declared_bias,
        output_bias=declared_bias and not family.qkv_bias,
        mlp_bias=fields.flag("mlp_bias", False),
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        tied_head=_tied(outer, fields, family),
        embed_scale=_embed_scale(fields, family, hidden) / residual_scale,
        query_scale=_query_scale(fields, family, head_dim),
        attention_softcap=_softcap(fields, family, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(fields, family, "final_logit_softcapping", 30.0),
        layer_windows=_layer_windows(fields, family, layer_types),
        layer_ropes=layer_ropes(
            fields, family, layer_types, [each.head_dim for each in layer_heads] or [head_dim] * layers
        ),
        bos_token_id=next(iter(_tokens("bos_token_id", generation, outer, fields)), None),
        eos_token_ids=_tokens("eos_token_id", generation, outer, fields),
        max_positions=fields.integer("max_position_embeddings"),
        pre_norms=family.pre_norms,
        fused_projections=family.fused,
        logit_scale=1 / granite_scale(fields, family, "logits_scaling"),
        query_temperature=query_temperature(fields, family),
        layer_heads=layer_heads,
        value_norm=family.name == "gemma4",
        layer_scalars=family.name == "gemma4",
        fused_gate_up=fields.raw("model_type") == GRANITE4,
    )


def _text_part(outer: Fields) -> tuple[Fields, Family]:
    nested = outer.section("text_config")
    fields = nested or outer
    model_type = fields.maybe_text("model_type") or outer.text("model_type")
    if model_type not in _MODEL_TYPES:
        raise unsupported_architecture(model_type)
    family = FAMILIES[_MODEL_TYPES[model_type]]
    if nested is not None and family.name not in _NESTED.get(outer.text("model_type", family.name), ()):
        raise unsupported_architecture(f"{outer.maybe_text('model_type')} with a {model_type} text_config")
    if family.name == "gemma3":
        return fields.with_defaults(_GEMMA3_DEFAULTS), family
    if family.name == "gemma4":
        fields = fields.with_defaults(_GEMMA4_DEFAULTS)
        _refuse_gemma4(fields)
    return (_granite4(fields) if model_type == GRANITE4 else fields), family


def _refuse_features(fields: Fields) -> None:
    for name, harmless in _REFUSED.items():
        value = fields.raw(name)
        if value is not None and value not in harmless:
            described = value.get("quant_method", "unnamed") if isinstance(value, Mapping) else value
            why = f": {_WHY_REFUSED[name]}" if name in _WHY_REFUSED else ""
            raise UnsupportedModel(f"{SOURCE}: {name} = {described!r} is not supported{why}")


def _refuse_gemma4(fields: Fields) -> None:
    if fields.flag("enable_moe_block", False):
        raise UnsupportedModel(f"{SOURCE}: mixtures of experts are not supported (enable_moe_block)")
    refuse_gemma4_small(
        SOURCE, fields.integer("hidden_size_per_layer_input"), fields.integer("num_kv_shared_layers", 0)
    )


def _granite4(fields: Fields) -> Fields:
    """As a Granite, whose MLP is the one that experts share here.

    Raises UnsupportedModel where a layer has a recurrent state."""
    types = fields.sequence("layer_types", str) or []
    if not types or set(types) - {"attention", "full_attention"}:
        raise unsupported_architecture(GRANITE4)
    fields = fields.with_defaults(_GRANITE4_DEFAULTS)
    return fields.with_values({"intermediate_size": fields.integer("shared_intermediate_size")})


def _layer_heads(
    fields: Fields, family: Family, layer_types: tuple[str, ...], local: LayerHeads
) -> tuple[LayerHeads, ...]:
    """The key heads of each layer, where global and local layers differ."""
    if family.name != "gemma4":
        return ()
    shared = fields.flag("attention_k_eq_v", False)
    # Two spellings: one for all global layers, or what is special of each layer.
    head_dim = fields.integer("global_head_dim", 512)
    kv_heads = fields.maybe_integer("num_global_key_value_heads") if shared else None
    special = fields.section("per_layer_config")
    return tuple(
        _global_heads(special and special.section(str(layer)), local, head_dim, kv_heads, shared)
        if kind == "full_attention"
        else local
        for layer, kind in enumerate(layer_types)
    )


def _global_heads(
    special: Fields | None, local: LayerHeads, head_dim: int, kv_heads: int | None, shared: bool
) -> LayerHeads:
    kv_heads = kv_heads or local.kv_heads
    if special is None:
        return LayerHeads(kv_heads, head_dim, shared)
    return LayerHeads(
        special.integer("num_key_value_heads", kv_heads), special.integer("head_dim", head_dim), shared
    )


def _head_dim(fields: Fields, family: Family, hidden: int, heads: int) -> int:
    if fields.raw("head_dim") is not None:
        return fields.integer("head_dim", least=1)
    if family.name in ("qwen3", "ministral3"):
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
        return fields.flag("tie_word_embeddings", family.tied)
    return outer.flag("tie_word_embeddings", family.tied)


def _embed_scale(fields: Fields, family: Family, hidden: int) -> float:
    return float(hidden**0.5) if family.gemma else granite_scale(fields, family, "embedding_multiplier")


def _query_scale(fields: Fields, family: Family, head_dim: int) -> float:
    if family.name == "gemma4":
        return 1.0
    if family.name == "granite":
        return granite_scale(fields, family, "attention_multiplier")
    scalar = fields.positive("query_pre_attn_scalar", 256) if family.gemma else float(head_dim)
    return float(scalar**-0.5)


def _softcap(fields: Fields, family: Family, name: str, gemma2_default: float) -> float | None:
    if not family.gemma:
        return None
    if family.name == "gemma2" and name not in fields:
        return gemma2_default
    return fields.maybe_number(name)


def _layer_types(fields: Fields, family: Family, layers: int) -> tuple[str, ...]:
    """'sliding_attention' or 'full_attention' for each layer."""
    local, everywhere = "sliding_attention", "full_attention"
    if family.name in _ALL_LOCAL + _NEVER_LOCAL:
        return (local if family.name in _ALL_LOCAL else everywhere,) * layers
    stated = fields.sequence("layer_types", str)
    if stated is not None:
        unknown = set(stated) - {local, everywhere}
        if unknown:
            raise UnsupportedModel(f"{SOURCE}: layer type {sorted(unknown)[0]!r} is not supported")
        if len(stated) != layers:
            raise CorruptCheckpoint(f"{SOURCE}: layer_types must have {layers} entries, got {len(stated)}")
        return tuple(stated)
    if family.name in ("qwen2", "qwen3"):
        first_local = fields.integer("max_window_layers", 28)
        return tuple(local if layer >= first_local else everywhere for layer in range(layers))
    pattern = fields.integer("sliding_window_pattern", family.local_pattern or 1, least=1)
    return tuple(local if (layer + 1) % pattern else everywhere for layer in range(layers))


def _layer_windows(fields: Fields, family: Family, layer_types: tuple[str, ...]) -> tuple[int | None, ...]:
    switched = family.name in ("qwen2", "qwen3", "smollm3")
    switched_off = switched and not fields.flag("use_sliding_window", False)
    absent = None if "sliding_window" in fields else _DEFAULT_WINDOW.get(family.name)
    window = None if switched_off else fields.maybe_integer("sliding_window") or absent
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _tokens(name: str, generation: Mapping[str, Any] | None, *configs: Fields) -> tuple[int, ...]:
    """The ids that any of the files names, without repeats; generation_config.json comes first."""
    sources = (Fields(generation or {}, "generation_config.json"), *configs)
    return tuple(dict.fromkeys(token for source in sources for token in source.token_ids(name)))

"""ModelConfig from the metadata of a GGUF file."""

from collections.abc import Collection, Mapping
from typing import Any

from kakeya.errors import CorruptCheckpoint, UnsupportedModel
from kakeya.models.config import (
    FAMILIES,
    Family,
    LayerHeads,
    ModelConfig,
    QueryTemperature,
    granite_scale,
    refuse_gemma4_small,
    slab_heads,
    unsupported_architecture,
)
from kakeya.models.fields import Fields
from kakeya.models.gguf_rope import Divisors, layer_ropes, original_positions

SOURCE = "GGUF metadata"

# End-of-turn tokens that chat models emit but some files do not name as their end token.
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<turn|>")
_CONTROL_TOKEN = 3  # token_type of special tokens
# GGUF does not store Gemma's query_pre_attn_scalar; only these sizes differ from head_dim. family -> layers
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}


def config_from_gguf(
    metadata: Mapping[str, Any],
    vocab_size: int,
    tensor_names: Collection[str],
    divisors: Divisors,
) -> ModelConfig:
    """`vocab_size` is the embedding table's row count and `divisors` what gguf_rope.DIVISOR_TENSORS hold.

    Raises UnsupportedModel for a network that is refused, CorruptCheckpoint for missing or senseless values.
    """
    architecture = Fields(metadata, SOURCE).text("general.architecture")
    fields = _own_fields(metadata, architecture)
    family = _family(architecture, fields)
    _refuse_features(fields)
    hidden, heads = fields.integer("embedding_length"), _uniform(fields, "attention.head_count")
    head_dim = _head_dim(fields, family, hidden // max(heads, 1))
    layers = fields.layer_count("block_count")
    is_local = _local_layers(fields, family, layers)
    layer_heads = _layer_heads(fields, family, is_local, tensor_names)
    global_dim = fields.integer("attention.key_length", head_dim)
    kv_heads = layer_heads[0].kv_heads if layer_heads else _uniform(fields, "attention.head_count_kv", heads)
    window = fields.integer("attention.sliding_window", 0) or None
    # Folded into the embeddings and the norms: hf_config says why that is the same.
    residual_scale = granite_scale(fields, family, "residual_scale")
    return ModelConfig(
        family=family.name,
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=_uniform(fields, "feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=slab_heads(layer_heads, kv_heads, head_dim),
        head_dim=head_dim,
        norm_eps=fields.number("attention.layer_norm_rms_epsilon") / residual_scale**2,
        norm_offset=0.0,  # the converter has added Gemma's 1 already
        activation="gelu_tanh" if family.gemma else "silu",
        attention_bias="blk.0.attn_q.bias" in tensor_names,
        output_bias="blk.0.attn_output.bias" in tensor_names,
        mlp_bias="blk.0.ffn_gate.bias" in tensor_names,
        qk_norm=family.qk_norm,
        post_norms=family.post_norms,
        tied_head="output.weight" not in tensor_names,
        embed_scale=_embed_scale(fields, family, hidden) / residual_scale,
        query_scale=_query_scale(fields, family, layers, hidden // max(heads, 1), head_dim),
        attention_softcap=_softcap(fields, family, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(fields, family, "final_logit_softcapping", 30.0),
        layer_windows=tuple(window if local else None for local in is_local),
        layer_ropes=layer_ropes(fields, family, is_local, global_dim, divisors),
        bos_token_id=Fields(metadata, SOURCE).maybe_integer("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(metadata),
        max_positions=fields.integer("context_length"),
        pre_norms=family.pre_norms,
        fused_projections=family.fused,
        logit_scale=1 / granite_scale(fields, family, "logit_scale"),
        query_temperature=_query_temperature(fields, family),
        layer_heads=layer_heads,
        value_norm=family.name == "gemma4",
        layer_scalars="blk.0.layer_output_scale.weight" in tensor_names,
    )


def _family(architecture: str, fields: Fields) -> Family:
    """The first family whose files have this architecture; OLMo 3 is an OLMo 2 with local layers there."""
    if architecture == "olmo2" and fields.integer("attention.sliding_window", 0):
        return FAMILIES["olmo3"]
    for family in FAMILIES.values():
        if architecture == (family.gguf_name or family.name):
            return family
    raise unsupported_architecture(architecture)


def _own_fields(metadata: Mapping[str, Any], architecture: str) -> Fields:
    prefix = f"{architecture}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    return Fields(own, f"{SOURCE}, {architecture}")


def _refuse_features(fields: Fields) -> None:
    if fields.integer("expert_count", 0):
        raise UnsupportedModel(
            f"{SOURCE}: mixture of experts ({fields.integer('expert_count')} experts) is not supported"
        )


def _refuse_other_values(fields: Fields, head_dim: int) -> None:
    value_length = fields.integer("attention.value_length", head_dim)
    if value_length != head_dim:
        raise UnsupportedModel(
            f"{SOURCE}: values of {value_length} dimensions beside keys of {head_dim} are not supported"
        )


def _head_dim(fields: Fields, family: Family, hidden_per_head: int) -> int:
    """Gemma 4's files state it for global and for local layers; the slab has the local one."""
    head_dim = fields.integer("attention.key_length", hidden_per_head)
    _refuse_other_values(fields, head_dim)
    return fields.integer("attention.key_length_swa", head_dim) if family.name == "gemma4" else head_dim


def _layer_heads(
    fields: Fields, family: Family, is_local: tuple[bool, ...], tensor_names: Collection[str]
) -> tuple[LayerHeads, ...]:
    """The key heads of each layer, where global and local layers differ."""
    if family.name != "gemma4":
        return ()
    refuse_gemma4_small(
        SOURCE,
        fields.integer("embedding_length_per_layer_input", 0),
        fields.integer("attention.shared_kv_layers", 0),
    )
    head_dim = fields.integer("attention.key_length")
    local_dim = fields.integer("attention.key_length_swa", head_dim)
    stated = fields.raw("attention.head_count_kv")
    counts = stated if isinstance(stated, list) else [stated] * len(is_local)
    if len(counts) != len(is_local) or not all(isinstance(count, int) and count > 0 for count in counts):
        raise CorruptCheckpoint(f"{SOURCE}: attention.head_count_kv must be {len(is_local)} positive numbers")
    return tuple(
        LayerHeads(count, local_dim if local else head_dim, f"blk.{layer}.attn_v.weight" not in tensor_names)
        for layer, (count, local) in enumerate(zip(counts, is_local, strict=True))
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
    if family.name == "gemma4":
        return 1.0
    stated = fields.maybe_number("attention.scale")
    if stated:
        return stated
    divided = hidden_per_head if _GEMMA_27B_LAYERS.get(family.name) == layers else head_dim
    return float(max(divided, 1) ** -0.5)


def _softcap(fields: Fields, family: Family, name: str, gemma2_default: float) -> float | None:
    if family.name == "gemma2":
        return fields.number(name, gemma2_default)
    return fields.maybe_number(name)


def _local_layers(fields: Fields, family: Family, layers: int) -> tuple[bool, ...]:
    """Which layers have the window, if there is one: those that the file names, or the family's."""
    stated = fields.raw("attention.sliding_window_pattern")
    if isinstance(stated, list):
        if len(stated) != layers or not all(isinstance(local, bool) for local in stated):
            raise CorruptCheckpoint(
                f"{SOURCE}: attention.sliding_window_pattern must be {layers} times true or false"
            )
        return tuple(stated)
    if family.local_pattern is None:
        return (True,) * layers
    pattern = fields.integer("attention.sliding_window_pattern", family.local_pattern, least=1)
    return tuple((layer + 1) % pattern != 0 for layer in range(layers))


def _embed_scale(fields: Fields, family: Family, hidden: int) -> float:
    return float(hidden**0.5) if family.gemma else granite_scale(fields, family, "embedding_scale")


def _query_temperature(fields: Fields, family: Family) -> QueryTemperature | None:
    beta = fields.number("attention.temperature_scale", 0.0) if family.name == "ministral3" else 0.0
    return QueryTemperature(beta, original_positions(fields)) if beta else None


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

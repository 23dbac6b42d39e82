"""The rotary embeddings that a Hugging Face config.json describes, one for each layer."""

import math
from collections.abc import Mapping, Sequence

from kakeya.errors import CorruptCheckpoint, UnsupportedModel
from kakeya.models.config import Family, QueryTemperature
from kakeya.models.fields import Fields
from kakeya.models.rope import (
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)

GRANITE4 = "granitemoehybrid"  # the model_type of Granite 4
_SUPPORTED = "linear, llama3, longrope, proportional, yarn"
_WHY_NOT = {
    "dynamic": "its angles depend on how long the text is",
    "mrope": "its angles depend on where in an image a token stands",
}


def layer_ropes(
    fields: Fields, family: Family, layer_types: tuple[str, ...], head_dims: Sequence[int]
) -> tuple[RopeConfig, ...]:
    """Layers of one type have heads of one size.

    Raises UnsupportedModel for a scaling that is refused, CorruptCheckpoint for senseless values."""
    by_type = _ropes_by_type(fields, family, dict(zip(layer_types, head_dims, strict=True)))
    turns = _layers_that_turn(fields, family, len(layer_types))
    return tuple(
        by_type[kind] if turning else RopeConfig.unrotated(by_type[kind].head_dim)
        for kind, turning in zip(layer_types, turns, strict=True)
    )


def query_temperature(fields: Fields, family: Family) -> QueryTemperature | None:
    if family.name != "ministral3":
        return None
    parameters = fields.section("rope_parameters")
    if parameters is None:
        raise CorruptCheckpoint("config.json: rope_parameters is missing")
    beta = parameters.number("llama_4_scaling_beta", 0.0)
    return QueryTemperature(beta, _original_positions(fields, parameters)) if beta else None


def _ropes_by_type(fields: Fields, family: Family, head_dims: Mapping[str, int]) -> dict[str, RopeConfig]:
    """`head_dims`: the size of a head for each type of layer there is."""
    parameters = fields.section("rope_parameters")
    if parameters is not None and ("full_attention" in parameters or "sliding_attention" in parameters):
        return {
            kind: _rope(fields, parameters.section(kind), family, _default_theta(family, kind), head_dim)
            for kind, head_dim in head_dims.items()
        }
    scaling = parameters or fields.section("rope_scaling")
    theta = fields.number("rope_theta", _default_theta(family, "full_attention"))
    by_type = {kind: _rope(fields, scaling, family, theta, head_dim) for kind, head_dim in head_dims.items()}
    # From before there were parameters for each type: the stated scaling is that of the global layers.
    head_dim = next(iter(head_dims.values()))
    if family.name == "gemma3":
        local = fields.number("rope_local_base_freq", _default_theta(family, "sliding_attention"))
        by_type["sliding_attention"] = RopeConfig(local, head_dim)
    elif family.name == "olmo3":
        by_type["sliding_attention"] = RopeConfig(theta, head_dim)
    return by_type


def _layers_that_turn(fields: Fields, family: Family, layers: int) -> list[bool]:
    """False for a layer without positions."""
    if fields.raw("model_type") == GRANITE4:
        return [fields.maybe_text("position_embedding_type") == "rope"] * layers
    if family.unrotated_pattern is None:
        return [True] * layers
    stated = fields.sequence("no_rope_layers", int)
    if stated is not None:
        if len(stated) < layers:
            raise CorruptCheckpoint(
                f"config.json: no_rope_layers has {len(stated)} entries for {layers} layers"
            )
        return [bool(turns) for turns in stated[:layers]]  # 1 means rotary, in spite of the name
    interval = fields.integer("no_rope_layer_interval", family.unrotated_pattern, least=1)
    return [(layer + 1) % interval != 0 for layer in range(layers)]


def _default_theta(family: Family, kind: str) -> float:
    is_global_gemma = family.name == "gemma3" and kind == "full_attention"
    return 1_000_000.0 if is_global_gemma else family.theta


def _rope(
    fields: Fields, parameters: Fields | None, family: Family, default_theta: float, head_dim: int
) -> RopeConfig:
    stated = fields.maybe_number("partial_rotary_factor")
    if parameters is None:
        return RopeConfig(default_theta, head_dim, rotated=_rotated(stated, head_dim))
    theta = parameters.number("rope_theta", default_theta)
    share = parameters.maybe_number("partial_rotary_factor")
    share = stated if share is None else share
    if _kind(parameters, family) == "proportional":
        return RopeConfig(theta, head_dim, _proportional(parameters, share, head_dim))
    scaling = _scaling(fields, parameters, family)
    return RopeConfig(theta, head_dim, scaling, _rotated(share, head_dim))


def _rotated(share: float | None, head_dim: int) -> int | None:
    """How many dimensions turn; None for all of them."""
    if share is None or share == 1:
        return None
    if not 0 <= share <= 1:
        raise CorruptCheckpoint(f"config.json: partial_rotary_factor must be from 0 to 1, got {share}")
    return int(head_dim * share)


def _kind(parameters: Fields, family: Family) -> str:
    if "mrope_section" in parameters:
        return "mrope"
    kind = parameters.maybe_text("rope_type") or parameters.maybe_text("type") or "default"
    # Phi-3's first files call LongRoPE by other names.
    return "longrope" if kind == "su" or (family.name == "phi3" and kind == "yarn") else kind


def _scaling(fields: Fields, parameters: Fields, family: Family) -> RopeScaling | None:
    kind = _kind(parameters, family)
    original = _original_positions(fields, parameters)
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(parameters.number("factor"))
        case "llama3":
            low, high = parameters.number("low_freq_factor"), parameters.number("high_freq_factor")
            return Llama3Scaling(parameters.number("factor"), low, high, original)
        case "longrope":
            return _longrope(fields, parameters, original)
        case "yarn":
            return _yarn(parameters, original)
    why = f": {_WHY_NOT[kind]}" if kind in _WHY_NOT else ""
    raise UnsupportedModel(
        f"config.json: RoPE scaling {kind!r} is not supported{why}; supported: {_SUPPORTED}"
    )


def _original_positions(fields: Fields, parameters: Fields) -> int:
    # Phi-3 states it beside the parameters, and there it counts.
    name = "original_max_position_embeddings"
    stated = parameters if fields.raw(name) is None else fields
    return stated.integer(name, fields.integer("max_position_embeddings"), least=1)


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


def _longrope(fields: Fields, parameters: Fields, original: int) -> LongRopeScaling:
    factor = parameters.number("factor", fields.integer("max_position_embeddings") / original)
    recommended = math.sqrt(1 + math.log(factor) / math.log(original)) if min(factor, original) > 1 else 1.0
    return LongRopeScaling(
        short=parameters.numbers("short_factor"),
        long=parameters.numbers("long_factor"),
        original_positions=original,
        attention_factor=parameters.number("attention_factor", recommended),
    )


def _proportional(parameters: Fields, share: float | None, head_dim: int) -> DivisorScaling:
    """The frequencies of a whole head, of which only the first turn."""
    turning = (_rotated(share, head_dim) or head_dim) // 2
    still = head_dim // 2 - turning
    return DivisorScaling((parameters.number("factor", 1.0),) * turning + (math.inf,) * still)

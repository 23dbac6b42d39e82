"""The rotary embeddings that a GGUF file describes, one for each layer."""

from collections.abc import Mapping

from kakeya.errors import UnsupportedModel
from kakeya.models.config import Family
from kakeya.models.fields import Fields
from kakeya.models.rope import (
    DivisorScaling,
    LinearScaling,
    LongRopeScaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)

# Tensors that are part of the configuration: what frequencies are divided by.
DIVISORS, SHORT_DIVISORS, LONG_DIVISORS = "rope_freqs", "rope_factors_short", "rope_factors_long"
DIVISOR_TENSORS = (DIVISORS, SHORT_DIVISORS, LONG_DIVISORS)
Divisors = Mapping[str, tuple[float, ...]]


def layer_ropes(
    fields: Fields, family: Family, is_local: tuple[bool, ...], head_dim: int, divisors: Divisors
) -> tuple[RopeConfig, ...]:
    """`divisors`: the numbers of those DIVISOR_TENSORS that the file has.

    Raises UnsupportedModel for a scaling that is refused, CorruptCheckpoint for senseless values.
    """
    theta = fields.number("rope.freq_base", 10_000.0)
    rotated = _rotated(fields, family, head_dim)
    rope = RopeConfig(theta, head_dim, _scaling(fields, divisors), rotated)
    local = _local_rope(fields, family, rope)
    unrotated, pattern = RopeConfig.unrotated(head_dim), family.unrotated_pattern
    if family.name == "granite" and not fields.flag("rope.scaling.finetuned", True):
        pattern = 1  # how Granite's files say that no layer has positions
    return tuple(
        unrotated if pattern and (layer + 1) % pattern == 0 else local if local_layer else rope
        for layer, local_layer in enumerate(is_local)
    )


def _rotated(fields: Fields, family: Family, head_dim: int) -> int | None:
    """How many dimensions turn; None for all of them."""
    rotated = fields.integer("rope.dimension_count", head_dim)
    if rotated == head_dim:
        return None
    if family.gguf_interleaved:
        raise UnsupportedModel(
            f"GGUF metadata: partial rotary ({rotated} of {head_dim} dimensions) of neighbouring pairs "
            "is not supported"
        )
    return rotated


def _local_rope(fields: Fields, family: Family, rope: RopeConfig) -> RopeConfig:
    """The rope of local layers. Only global layers are scaled."""
    if family.name == "gemma3":
        return RopeConfig(fields.number("rope.freq_base_swa", 10_000.0), rope.head_dim)
    if family.name == "gemma4":
        head_dim = fields.integer("attention.key_length_swa", rope.head_dim)
        rotated = fields.integer("rope.dimension_count_swa", head_dim)
        theta = fields.number("rope.freq_base_swa", 10_000.0)
        return RopeConfig(theta, head_dim, rotated=None if rotated == head_dim else rotated)
    if family.name == "olmo3":
        return RopeConfig(fields.number("rope.freq_base_swa", rope.theta), rope.head_dim)
    return rope


def _scaling(fields: Fields, divisors: Divisors) -> RopeScaling | None:
    if DIVISORS in divisors:
        return DivisorScaling(divisors[DIVISORS])
    kind = fields.text("rope.scaling.type", "none")
    if SHORT_DIVISORS in divisors and LONG_DIVISORS in divisors:
        return _longrope(fields, divisors)
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
        f"GGUF metadata: RoPE scaling {kind!r} is not supported; supported: linear, yarn, "
        f"and the tensors {', '.join(DIVISOR_TENSORS)}"
    )


def _longrope(fields: Fields, divisors: Divisors) -> LongRopeScaling:
    return LongRopeScaling(
        short=divisors[SHORT_DIVISORS],
        long=divisors[LONG_DIVISORS],
        original_positions=original_positions(fields),
        attention_factor=fields.number("rope.scaling.attn_factor", 1.0),
    )


def _yarn(fields: Fields) -> YarnScaling:
    factor = fields.number("rope.scaling.factor")
    stated = fields.number("rope.scaling.yarn_attn_factor", fields.number("rope.scaling.attn_factor", 1.0))
    # The file keeps one of two numbers whose quotient counts; the other is 1 where it does.
    by_file = fields.maybe_number("rope.scaling.yarn_log_multiplier") or None
    return YarnScaling(
        factor=factor,
        original_positions=original_positions(fields),
        attention_factor=stated * yarn_attention_factor(factor, 1.0 if by_file else None, by_file),
        beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
    )


def original_positions(fields: Fields) -> int:
    return fields.integer("rope.scaling.original_context_length", fields.integer("context_length"))

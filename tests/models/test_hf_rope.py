"""Rotary settings of config.json: of each layer type, in part, and the fields of each scaling."""

import math

import pytest

from kakeya.models.config import QueryTemperature
from kakeya.models.rope import LongRopeScaling, RopeConfig, YarnScaling
from support.tiny import parse_config


def test_rope_of_each_layer_type_may_be_left_out() -> None:
    config = parse_config(
        model_type="gemma3_text",
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={"full_attention": {"rope_theta": 5e5}, "sliding_attention": None},
    )
    assert [rope.theta for rope in config.layer_ropes] == [1e4, 5e5, 1e4, 5e5]


def test_yarn_fields() -> None:
    stated = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_slow": 2.0}
    scaling = parse_config(rope_scaling=stated).layer_ropes[0].scaling
    assert scaling == YarnScaling(4.0, 512, 1.5, 32.0, 2.0, True)


def test_rotary_in_part() -> None:
    assert parse_config(partial_rotary_factor=0.5).layer_ropes[0] == RopeConfig(10_000.0, 16, rotated=8)
    stated = {"rope_theta": 1e4, "partial_rotary_factor": 0.25}
    assert parse_config(rope_parameters=stated).layer_ropes[0].rotated == 4
    assert parse_config(partial_rotary_factor=1.0) == parse_config()


def test_layers_without_positions() -> None:
    config = parse_config(model_type="smollm3", no_rope_layer_interval=2)
    assert [rope.rotated for rope in config.layer_ropes] == [None, 0, None, 0]
    assert config.tied_head
    assert config.layer_windows == (None,) * 4


def test_longrope_fields() -> None:
    stated = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2] * 8}
    scaling = (
        parse_config(model_type="phi3", rope_scaling=stated, original_max_position_embeddings=64)
        .layer_ropes[0]
        .scaling
    )
    growth = (1 + math.log(8) / math.log(64)) ** 0.5
    assert scaling == LongRopeScaling((1.0,) * 8, (2.0,) * 8, 64, pytest.approx(growth))
    unstretched = parse_config(rope_scaling=stated | {"type": "longrope"}).layer_ropes[0].scaling
    assert unstretched == LongRopeScaling((1.0,) * 8, (2.0,) * 8, 512, 1.0)


def test_temperature_of_queries() -> None:
    stated = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6}
    plain = parse_config(model_type="ministral3", head_dim=None, rope_parameters=stated)
    assert (plain.query_temperature, plain.head_dim) == (None, 128)
    warm = parse_config(model_type="ministral3", rope_parameters=stated | {"llama_4_scaling_beta": 0.1})
    assert warm.query_temperature == QueryTemperature(0.1, 64)
    assert warm.layer_windows == (None,) * 4

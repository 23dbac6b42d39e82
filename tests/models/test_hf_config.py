"""config.json: what is understood, what is refused by name, what is senseless."""

import math
from dataclasses import replace
from typing import Any

import pytest

from kakeya.errors import CorruptCheckpoint, UnsupportedModel
from kakeya.models.config import LayerHeads
from kakeya.models.hf_config import config_from_hf
from kakeya.models.rope import DivisorScaling, LinearScaling, RopeConfig
from support.tiny import CONFIG_JSON, parse_config

GEMMA4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def test_plain_llama() -> None:
    config = parse_config()
    assert (config.family, config.head_dim, config.num_kv_heads) == ("llama", 16, 2)
    assert (config.query_size, config.kv_size) == (64, 32)
    assert config.layer_ropes == (RopeConfig(10_000.0, 16),) * 4
    assert config.layer_windows == (None,) * 4
    assert config.query_scale == 0.25
    assert not config.tied_head


def test_absent_and_null_mean_the_default() -> None:
    assert parse_config(num_key_value_heads=None).num_kv_heads == 4
    assert parse_config(head_dim=None).head_dim == 16
    assert parse_config(rope_scaling=None, rope_theta=None).layer_ropes[0].theta == 10_000.0
    assert parse_config(text_config=None).family == "llama"


def test_windows_of_each_family() -> None:
    assert parse_config(model_type="mistral").layer_windows == (4096,) * 4
    assert parse_config(model_type="mistral", sliding_window=None).layer_windows == (None,) * 4
    assert (
        parse_config(model_type="qwen2", sliding_window=8, max_window_layers=0).layer_windows == (None,) * 4
    )
    local = {"use_sliding_window": True, "sliding_window": 8}
    assert parse_config(model_type="qwen3", **local, max_window_layers=3).layer_windows == (
        None,
        None,
        None,
        8,
    )
    types = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    assert parse_config(model_type="qwen2", **local, layer_types=types).layer_windows == (8, None, None, 8)
    assert parse_config(model_type="gemma2", sliding_window=8).layer_windows == (8, None, 8, None)
    gemma3 = parse_config(model_type="gemma3_text", sliding_window=8, sliding_window_pattern=3)
    assert gemma3.layer_windows == (8, 8, None, 8)
    assert [rope.theta for rope in gemma3.layer_ropes] == [1e4, 1e4, 1e4, 1e4]  # rope_theta is stated


def test_gemma3_published_files_leave_most_fields_out() -> None:
    raw = {
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "text_config": {
            "model_type": "gemma3_text",
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }
    config = config_from_hf(raw)
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262_208, 8, 4, 256)
    assert config.layer_windows[:7] == (1024,) * 5 + (None, 1024)
    assert config.layer_ropes[5] == RopeConfig(1e6, 256, LinearScaling(8.0))
    assert config.layer_ropes[0] == RopeConfig(1e4, 256)
    assert config.eos_token_ids == (1, 106)
    assert config.tied_head
    assert config.query_scale == 1 / 16
    assert config.logit_softcap is None


def test_gemma2_softcaps() -> None:
    assert parse_config(model_type="gemma2").logit_softcap == 30.0
    assert parse_config(model_type="gemma2").attention_softcap == 50.0
    assert parse_config(model_type="gemma2", final_logit_softcapping=None).logit_softcap is None
    assert parse_config(final_logit_softcapping=7.0).logit_softcap is None  # a Llama has none


def test_granites_multipliers_are_folded() -> None:
    config = parse_config(
        model_type="granite",
        embedding_multiplier=12.0,
        residual_multiplier=0.5,
        attention_multiplier=0.1,
        logits_scaling=8.0,
    )
    assert (config.embed_scale, config.norm_eps) == (24.0, 4e-5)
    assert (config.query_scale, config.logit_scale) == (0.1, 0.125)
    assert parse_config(residual_multiplier=0.5) == parse_config()  # a Llama has none


def test_a_granite4_without_states_and_experts_is_a_granite() -> None:
    published = {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention"] * 4,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 96,
    }
    config = parse_config(**published)
    assert (config.family, config.intermediate_size, config.fused_gate_up) == ("granite", 96, True)
    assert config.layer_ropes[0].rotated is None
    unrotated = parse_config(**published | {"position_embedding_type": "nope"})
    assert set(unrotated.layer_ropes) == {RopeConfig.unrotated(config.head_dim)}


def test_heads_of_gemma4s_layers() -> None:
    stated = {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
    config = parse_config(**GEMMA4 | stated)
    local, everywhere = LayerHeads(2, 16), LayerHeads(1, 32, values_are_keys=True)
    assert config.layer_heads == (local, everywhere) * 2
    assert (config.num_kv_heads, config.head_dim, config.query_scale) == (2, 16, 1.0)
    assert [rope.head_dim for rope in config.layer_ropes] == [16, 32, 16, 32]
    assert config.layer_ropes[1].scaling == DivisorScaling((1.0,) * 4 + (math.inf,) * 12)
    assert config.layer_windows == (512, None, 512, None)
    # A slab holds the larger of both; the smaller ones lie in it twice.
    own_values = parse_config(**GEMMA4 | {"num_key_value_heads": 1, "global_head_dim": 32})
    assert (own_values.num_kv_heads, own_values.kv_copies(own_values.heads_of(0))) == (2, 2)
    with pytest.raises(CorruptCheckpoint, match="layer_heads must have 4 entries"):
        replace(config, layer_heads=(local,))


def test_end_tokens_of_all_files_are_united() -> None:
    config = config_from_hf(CONFIG_JSON | {"eos_token_id": 5, "bos_token_id": 3}, {"eos_token_id": [7, 5]})
    assert config.eos_token_ids == (7, 5)
    assert config.bos_token_id == 3


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"model_type": "mixtral"},
            "architecture 'mixtral' is not supported: .* no router .*; supported families: llama, mistral",
        ),
        ({"model_type": "glm"}, "architecture 'glm' is not supported; supported families: llama"),
        (
            {"model_type": "mamba"},
            "'mamba' is not supported: a recurrent state cannot be evicted",
        ),
        ({"model_type": "qwen3_next"}, "'qwen3_next' is not supported: a recurrent state"),
        (
            {"model_type": "llava_next", "text_config": {"model_type": "llama"}},
            "'llava_next with a llama text_config' is not supported; supported families",
        ),
        ({"num_local_experts": 8}, "num_local_experts = 8 is not supported: this network has no router"),
        ({"model_type": "granitemoehybrid"}, "'granitemoehybrid' is not supported: a recurrent state"),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["attention", "mamba"]},
            "'granitemoehybrid' is not supported: a recurrent state",
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["attention"] * 4},
            "num_local_experts = 8 is not supported: this network has no router",
        ),
        (
            {"model_type": "gemma3n"},
            "'gemma3n' is not supported: it has an embedding for each layer",
        ),
        ({"model_type": "gemma4_text"}, "an embedding for each layer .256 numbers a token. is not supported"),
        (GEMMA4 | {"num_kv_shared_layers": 2}, "last 2 layers attend to the keys of earlier ones"),
        (GEMMA4 | {"enable_moe_block": True}, "mixtures of experts are not supported"),
        (GEMMA4 | {"global_head_dim": 24}, "2 key heads of 16 do not fit a slab of 3 of 16"),
        (GEMMA4 | {"global_head_dim": 20}, "heads of 16 do not fill a slab of 40 numbers a token"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}, "architecture 'mistral4'"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "quantization_config = 'gptq' is .*: of quantized weights GGUF",
        ),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_act": "relu"}, "activation 'relu'"),
        ({"model_type": "gemma2", "hidden_activation": "gelu"}, "activation 'gelu'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "RoPE scaling 'dynamic' is .*: its angles"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "RoPE scaling 'mrope' is .* image"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 4}, "layer type 'linear_attention'"),
    ],
)
def test_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config(**changes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": None}, "config.json: hidden_size is missing"),
        ({"hidden_size": "64"}, "hidden_size must be a whole number, got '64'"),
        ({"hidden_size": True}, "hidden_size must be a whole number"),
        ({"hidden_size": 10**400}, "hidden_size must be a whole number, got 1000.*…"),
        ({"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4"),
        ({"hidden_size": -64, "head_dim": 16}, "hidden_size must be at least 1"),
        ({"num_attention_heads": 0}, "not a multiple of num_attention_heads 0"),
        ({"num_key_value_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"head_dim": 0}, "head_dim must be at least 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be from 1 to 4096"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be from 1 to 4096"),
        ({"rms_norm_eps": 0}, "norm_eps must be positive"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps must be a finite number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a finite number"),
        ({"rope_theta": math.nan}, "rope_theta must be a finite number"),
        ({"rope_scaling": {"type": "linear"}}, "config.json, rope_scaling: factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"rope_scaling": {"type": 3}}, "type must be a text"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "short_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": 1}},
            "short_factor must be a list of numbers",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0]}},
            "rope divisors must be 8 positive numbers",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 0}},
            "original_max_position_embeddings must be at least 1",
        ),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be from 0 to 1, got 1.5"),
        ({"partial_rotary_factor": 0.2}, "rotary dimensions must be even and at most 16, got 3"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers has 1 entries for 4 layers"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval must be at least 1"),
        ({"model_type": "granite", "residual_multiplier": 0}, "residual_multiplier must be positive"),
        ({"model_type": "ministral3"}, "rope_parameters is missing"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"model_type": "qwen2", "layer_types": [[]]}, "layer_types must be a list of str"),
        (
            {"model_type": "qwen2", "layer_types": ["full_attention"]},
            "layer_types must have 4 entries, got 1",
        ),
        ({"model_type": "gemma3", "sliding_window_pattern": 0}, "sliding_window_pattern must be at least 1"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be positive"),
        ({"model_type": "gemma2", "final_logit_softcapping": -1.0}, "logit_softcap must be positive"),
        ({"model_type": "mistral", "sliding_window": -1}, "window must be at least 1"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id must be a token id or a list of them"),
        ({"eos_token_id": 100}, "token id 100 is outside the vocabulary of 100"),
        ({"bos_token_id": -1}, "token id -1 is outside"),
    ],
)
def test_senseless_values_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        parse_config(**changes)

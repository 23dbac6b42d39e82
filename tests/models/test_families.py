"""Every family agrees with `transformers`, through real files."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kakeya.models.checkpoint import open_checkpoint
from support.families import GEMMA4, SHAPE, VOCAB, decoder_logits, expected_logits, load_float32, save_random

# Longer than every local window and every original context below.
TOKENS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 16,
    "patch_size": 8,
}

# Granite 4 without recurrent layers and experts. Nothing reads its intermediate_size.
GRANITE4 = SHAPE | {
    "num_local_experts": 0,
    "shared_intermediate_size": 40,
    "layer_types": ["full_attention"] * 3,
    "position_embedding_type": "rope",
    "mamba_n_heads": 8,
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.5,
    "rms_norm_eps": 1e-2,
}


def longrope(original: int, half: int, **more: object) -> dict[str, object]:
    return {
        "rope_type": "longrope",
        "rope_theta": 500.0,
        "short_factor": [1.0 + 0.1 * i for i in range(half)],
        "long_factor": [2.0 + 0.5 * i for i in range(half)],
        "original_max_position_embeddings": original,
        **more,
    }


CASES: dict[str, transformers.PreTrainedConfig] = {
    "llama": transformers.LlamaConfig(**SHAPE),
    "llama tied, wide heads": transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True, head_dim=16),
    "llama biases": transformers.LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama rope linear": transformers.LlamaConfig(**SHAPE, rope_parameters=LINEAR),
    "llama rope llama3": transformers.LlamaConfig(**SHAPE, head_dim=32, rope_parameters=LLAMA3),
    "llama rope yarn": transformers.LlamaConfig(**SHAPE, head_dim=32, rope_parameters=YARN),
    "llama rope yarn tuned": transformers.LlamaConfig(
        **SHAPE,
        head_dim=32,
        rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.4, "truncate": False, "beta_fast": 8.0},
    ),
    "mistral local": transformers.MistralConfig(**SHAPE, sliding_window=6),
    "mistral global": transformers.MistralConfig(**SHAPE, sliding_window=None),
    "qwen2": transformers.Qwen2Config(**SHAPE),
    "qwen2 some local": transformers.Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": transformers.Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "qwen3 biases": transformers.Qwen3Config(**SHAPE, head_dim=8, attention_bias=True),
    "mistral nested": transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**SHAPE, head_dim=16, sliding_window=None).to_dict(),
        vision_config=VISION | {"model_type": "pixtral", "head_dim": 8},
        tie_word_embeddings=False,
        image_token_index=VOCAB - 1,
    ),
    "ministral3": transformers.Ministral3Config(
        **SHAPE,
        head_dim=32,
        rope_parameters=YARN
        | {
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "phi3": transformers.Phi3Config(**SHAPE, sliding_window=6),
    "phi3 partial": transformers.Phi3Config(
        **SHAPE | {"num_attention_heads": 2},
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75},
    ),
    "phi3 longrope, short": transformers.Phi3Config(
        **SHAPE | {"num_attention_heads": 2},
        original_max_position_embeddings=40,
        rope_parameters=longrope(40, 6, partial_rotary_factor=0.75),
    ),
    "phi3 longrope, long": transformers.Phi3Config(
        **SHAPE, original_max_position_embeddings=32, rope_parameters=longrope(32, 4)
    ),
    "smollm3": transformers.SmolLM3Config(**SHAPE | {"num_hidden_layers": 5}, tie_word_embeddings=True),
    "smollm3 stated": transformers.SmolLM3Config(
        **SHAPE, no_rope_layers=[0, 1, 0], attention_bias=True, tie_word_embeddings=False
    ),
    "olmo2": transformers.Olmo2Config(**SHAPE),
    "olmo3": transformers.Olmo3Config(
        **SHAPE | {"num_hidden_layers": 5},
        sliding_window=6,
        rope_parameters={LOCAL: {"rope_type": "default", "rope_theta": 500.0}, GLOBAL: YARN},
    ),
    "granite": transformers.GraniteConfig(
        **SHAPE,
        embedding_multiplier=12.0,
        attention_multiplier=0.2,
        residual_multiplier=0.22,
        logits_scaling=0.5,
        attention_bias=True,
        mlp_bias=True,
        rms_norm_eps=1e-2,
    ),
    "granite4": transformers.GraniteMoeHybridConfig(**GRANITE4, attention_bias=True),
    "granite4 without positions": transformers.GraniteMoeHybridConfig(
        **GRANITE4 | {"position_embedding_type": None}
    ),
    "gemma2": transformers.Gemma2Config(
        **SHAPE,
        head_dim=8,
        sliding_window=6,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **SHAPE, head_dim=8, sliding_window=6, query_pre_attn_scalar=24, layer_types=[LOCAL, GLOBAL, LOCAL]
    ),
    "gemma3 scaled": transformers.Gemma3TextConfig(
        **SHAPE,
        head_dim=8,
        sliding_window=6,
        layer_types=[LOCAL, GLOBAL, LOCAL],
        rope_parameters={LOCAL: {"rope_type": "default", "rope_theta": 50.0}, GLOBAL: LINEAR},
    ),
    # Of global layers: one key head of 32 beside four of 16, and values that are keys.
    "gemma4": transformers.Gemma4TextConfig(
        **GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=5.0
    ),
    "gemma4 own values": transformers.Gemma4TextConfig(**GEMMA4 | {"num_key_value_heads": 2}),
    "gemma4 nested": transformers.Gemma4Config(
        text_config=transformers.Gemma4TextConfig(**GEMMA4 | {"num_key_value_heads": 1}).to_dict(),
        vision_config=None,
        audio_config=None,
        image_token_id=8,  # none of these is among the tokens below
        video_token_id=9,
        audio_token_id=11,
    ),
    "gemma3 nested": transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(
            **SHAPE, head_dim=8, sliding_window=6, layer_types=[GLOBAL, LOCAL, LOCAL]
        ).to_dict(),
        vision_config=VISION,
        mm_tokens_per_image=1,
        image_token_index=VOCAB - 1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_agree_with_transformers(case: str, tmp_path: Path) -> None:
    model = save_random(CASES[case], tmp_path)
    expected = expected_logits(model, TOKENS)
    found = decoder_logits(load_float32(tmp_path), TOKENS)
    assert expected.std() > 0.3  # logits that say something
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "case",
    ["llama rope llama3", "llama rope yarn", "gemma3 scaled", "olmo3", "phi3 partial", "qwen2 some local"],
)
def test_older_spelling_of_the_same_config(case: str, tmp_path: Path) -> None:
    """rope_theta, rope_scaling and rope_local_base_freq, from before there were `rope_parameters`."""
    save_random(CASES[case], tmp_path)
    today = open_checkpoint(tmp_path).config
    raw = json.loads((tmp_path / "config.json").read_text())
    parameters = raw.pop("rope_parameters")
    if GLOBAL in parameters:
        raw["rope_local_base_freq"] = parameters[LOCAL]["rope_theta"]
        parameters = parameters[GLOBAL]
    raw["rope_theta"] = parameters.pop("rope_theta")
    raw["rope_scaling"] = {"type": parameters.pop("rope_type"), **parameters}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert open_checkpoint(tmp_path).config == today


def test_sharded_files_are_one_model(tmp_path: Path) -> None:
    model = save_random(CASES["llama"], tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    found = decoder_logits(load_float32(tmp_path), TOKENS)
    assert (found - expected_logits(model, TOKENS)).abs().max() <= 1e-4


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_both_prefixes_of_nested_text_models(prefix: str, tmp_path: Path) -> None:
    model = save_random(CASES["gemma3 nested"], tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    text = {
        name.split("language_model.")[1].removeprefix("model."): name
        for name in stored
        if "language_model" in name
    }
    others = {name: tensor for name, tensor in stored.items() if "language_model" not in name}
    renamed = {prefix + bare: stored[name] for bare, name in text.items()}
    save_file(renamed | others, tmp_path / "model.safetensors")
    found = decoder_logits(load_float32(tmp_path), TOKENS)
    assert (found - expected_logits(model, TOKENS)).abs().max() <= 1e-4


def test_untied_head_of_a_nested_text_model(tmp_path: Path) -> None:
    save_random(CASES["gemma3 nested"], tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["tie_word_embeddings"] = raw["text_config"]["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(raw))
    stored = load_file(tmp_path / "model.safetensors")
    head = torch.randn(VOCAB, SHAPE["hidden_size"])
    save_file(stored | {"language_model.lm_head.weight": head}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert len(checkpoint.fingerprint) == 64
    assert not checkpoint.config.tied_head
    assert torch.equal(checkpoint.tensor("lm_head.weight"), head)

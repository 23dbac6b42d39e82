"""Every family agrees with `transformers`, through GGUF files."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from support import gguf_files
from support.families import GEMMA4, SHAPE, VOCAB, decoder_logits, expected_logits, load_float32, save_random

TOKENS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()
GEMMA_SHAPE = SHAPE | {"num_hidden_layers": 7, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 6}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
YARN_METADATA = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 16,
}
MODELS = {
    "llama": (gguf_files.LLAMA, {}),
    "llama tied with biases": (
        transformers.LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        {"attention__head_count_kv": [2, 2, 2]},
    ),
    "qwen2": (transformers.Qwen2Config(**SHAPE), {}),
    "qwen3": (transformers.Qwen3Config(**SHAPE, head_dim=16), {}),
    "gemma2": (
        transformers.Gemma2Config(**GEMMA_SHAPE, attn_logit_softcapping=3.0, final_logit_softcapping=5.0),
        {"attention__sliding_window": 6, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (transformers.Gemma3TextConfig(**GEMMA_SHAPE), {"attention__sliding_window": 6}),
    "gemma4": (
        transformers.Gemma4TextConfig(
            **GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=5.0
        ),
        {
            "attention__key_length": 32,
            "attention__value_length": 32,
            "attention__key_length_swa": 16,
            "attention__value_length_swa": 16,
            "attention__head_count_kv": [4, 1, 4, 1],
            "attention__sliding_window": 5,
            "attention__sliding_window_pattern": [True, False, True, False],
            "attention__shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
            "rope__dimension_count": 32,
            "rope__dimension_count_swa": 16,
            "final_logit_softcapping": 5.0,
        },
    ),
    "mistral": (transformers.MistralConfig(**SHAPE, head_dim=16, sliding_window=None), {}),
    "ministral3": (
        transformers.Ministral3Config(
            **SHAPE,
            head_dim=32,
            rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
        ),
        YARN_METADATA | {"rope__scaling__yarn_log_multiplier": 1.0, "attention__temperature_scale": 0.3},
    ),
    "phi3": (transformers.Phi3Config(**SHAPE, sliding_window=6), {"attention__sliding_window": 6}),
    "phi3 partial": (
        transformers.Phi3Config(
            **SHAPE | {"num_attention_heads": 2},
            rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75},
        ),
        {"rope__dimension_count": 12, "attention__sliding_window": 0},
    ),
    "smollm3": (
        transformers.SmolLM3Config(**SHAPE | {"num_hidden_layers": 5}, tie_word_embeddings=True),
        {"rope__dimension_count": 8},
    ),
    "olmo2": (transformers.Olmo2Config(**SHAPE), {}),
    "olmo3": (
        transformers.Olmo3Config(
            **SHAPE | {"num_hidden_layers": 5},
            sliding_window=6,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": YARN,
            },
        ),
        YARN_METADATA
        | {
            "attention__sliding_window": 6,
            "attention__sliding_window_pattern": [True, True, True, False, True],
        },
    ),
    "granite": (
        transformers.GraniteConfig(
            **SHAPE,
            embedding_multiplier=12.0,
            attention_multiplier=0.2,
            residual_multiplier=0.22,
            logits_scaling=0.5,
            rms_norm_eps=1e-2,
        ),
        {"attention__scale": 0.2, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 0.5},
    ),
}


@pytest.mark.parametrize("case", MODELS)
def test_logits_agree_with_transformers(case: str, tmp_path: Path) -> None:
    config, metadata = MODELS[case]
    model = save_random(config, tmp_path)
    # Gemma 4's global layers turn a quarter of their pairs; so its files say the others are divided away.
    still = {"rope_freqs.weight": np.array([1.0] * 4 + [1e30] * 12, dtype=np.float32)}
    path = gguf_files.write_model(
        tmp_path / "model.gguf", model, still if case == "gemma4" else None, **metadata
    )
    found = decoder_logits(load_float32(path), TOKENS)
    assert (found - expected_logits(model, TOKENS)).abs().max() <= 1e-4

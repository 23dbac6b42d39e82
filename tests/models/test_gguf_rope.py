"""Rotary settings of GGUF files: in their metadata and in their tensors."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kakeya.errors import UnsupportedModel
from kakeya.models.checkpoint import open_checkpoint
from kakeya.models.config import ModelConfig
from kakeya.models.rope import DivisorScaling, LinearScaling, RopeConfig, YarnScaling
from support import gguf_files
from support.families import SHAPE, VOCAB, decoder_logits, expected_logits, load_float32, save_random

TOKENS = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def test_llama3_scaling_through_its_tensor(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    model = save_random(transformers.LlamaConfig(**SHAPE, head_dim=32, rope_parameters=rope), tmp_path)
    plain = 500.0 ** -(np.arange(0, 32, 2) / 32)
    divisors = (plain / model.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    assert divisors[0] == 1
    assert divisors[-1] > 7.9
    path = gguf_files.write_model(tmp_path / "x.gguf", model, {"rope_freqs.weight": divisors})
    assert (decoder_logits(load_float32(path), TOKENS) - expected_logits(model, TOKENS)).abs().max() <= 1e-4


@pytest.mark.parametrize("original", [40, 32], ids=["short", "long"])
def test_longrope_through_its_tensors(original: int, tmp_path: Path) -> None:
    short, long = [1.0, 1.5, 2.0, 2.5, 3.0, 3.5], [4.0, 5.0, 6.0, 7.0, 8.0, 9.0]
    config = transformers.Phi3Config(
        **SHAPE | {"num_attention_heads": 2},
        original_max_position_embeddings=original,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "short_factor": short,
            "long_factor": long,
            "partial_rotary_factor": 0.75,
        },
    )
    model = save_random(config, tmp_path)
    growth = (1 + np.log(128 / original) / np.log(original)) ** 0.5
    path = gguf_files.write_model(
        tmp_path / "x.gguf",
        model,
        {
            "rope_factors_short.weight": np.array(short, dtype=np.float32),
            "rope_factors_long.weight": np.array(long, dtype=np.float32),
        },
        rope__dimension_count=12,
        rope__scaling__original_context_length=original,
        rope__scaling__attn_factor=float(growth),
    )
    assert (decoder_logits(load_float32(path), TOKENS) - expected_logits(model, TOKENS)).abs().max() <= 1e-4


def config_with(path: Path, **metadata: object) -> ModelConfig:
    return open_checkpoint(gguf_files.write_bare(path / "model.gguf", **metadata)).config


def test_rope_scaling(tmp_path: Path) -> None:
    linear = config_with(tmp_path, rope__scaling__type="linear", rope__scaling__factor=4.0)
    assert linear.layer_ropes[0].scaling == LinearScaling(4.0)
    older = config_with(tmp_path, rope__scale_linear=2.0)
    assert older.layer_ropes[0].scaling == LinearScaling(2.0)
    yarn = config_with(
        tmp_path,
        rope__scaling__type="yarn",
        rope__scaling__factor=4.0,
        rope__scaling__original_context_length=32,
        rope__scaling__attn_factor=2.0,
    )
    assert yarn.layer_ropes[0].scaling == YarnScaling(4.0, 32, pytest.approx(2 * 1.1386, abs=1e-3))
    with pytest.raises(UnsupportedModel, match="'longrope'"):
        config_with(tmp_path, rope__scaling__type="longrope")


def test_rope_divisors_come_from_their_tensor(tmp_path: Path) -> None:
    divisors = {"rope_freqs.weight": np.array([1, 2, 4, 8], dtype=np.float32)}
    config = open_checkpoint(gguf_files.write_bare(tmp_path / "x.gguf", tensors=divisors)).config
    assert {rope.scaling for rope in config.layer_ropes} == {DivisorScaling((1.0, 2.0, 4.0, 8.0))}


@pytest.mark.parametrize("turns", [True, False])
def test_a_granite_file_says_whether_its_layers_have_positions(turns: bool, tmp_path: Path) -> None:
    config = transformers.GraniteConfig(**SHAPE)
    path = gguf_files.write_bare(tmp_path / "x.gguf", config, "granite", rope__scaling__finetuned=turns)
    ropes = set(open_checkpoint(path).config.layer_ropes)
    assert ropes == {RopeConfig(10_000.0, 8) if turns else RopeConfig.unrotated(8)}

"""Configurations in GGUF metadata: what is understood, left out, refused by name."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import transformers

from kakeya.errors import CorruptCheckpoint, ModelError, UnsupportedModel
from kakeya.models.checkpoint import open_checkpoint
from kakeya.models.config import ModelConfig
from support import gguf_files
from support.families import SHAPE


def config_with(path: Path, **metadata: object) -> ModelConfig:
    return open_checkpoint(gguf_files.write_bare(path / "model.gguf", **metadata)).config


def test_tokens_that_end_a_turn(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    gguf_files.add_geometry(writer, gguf_files.LLAMA)
    writer.add_tensor("token_embd.weight", np.zeros((5, 32), dtype=np.float32))
    writer.add_token_list(["a", "</s>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>"])
    writer.add_token_types([1, 3, 1, 3, 3])  # <|im_end|> is ordinary text here
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(0)
    config = open_checkpoint(gguf_files.finish(writer, tmp_path / "x.gguf")).config
    assert config.eos_token_ids == (1, 3, 4)
    assert config.bos_token_id == 0


def test_gemma_facts_that_files_leave_out(tmp_path: Path) -> None:
    shape = SHAPE | {"num_hidden_layers": 46, "num_attention_heads": 2, "head_dim": 8}
    path = gguf_files.write_bare(tmp_path / "x.gguf", transformers.Gemma2Config(**shape), "gemma2")
    config = open_checkpoint(path).config
    assert config.query_scale == 16**-0.5  # 27B divides by the hidden size per head
    assert (config.attention_softcap, config.logit_softcap) == (50.0, 30.0)
    assert set(config.layer_windows) == {None}


def test_query_scale_that_the_file_states(tmp_path: Path) -> None:
    assert config_with(tmp_path, attention__scale=0.5).query_scale == 0.5


def test_a_stated_window_counts(tmp_path: Path) -> None:
    assert config_with(tmp_path, attention__sliding_window=7).layer_windows == (7, 7, 7)


@pytest.mark.parametrize(
    "metadata, message",
    [
        ({"expert_count": 8}, "mixture of experts"),
        ({"rope__dimension_count": 4}, "partial rotary"),
        ({"attention__value_length": 16}, "values of 16 dimensions"),
        ({"attention__head_count_kv": [2, 1, 2]}, "attention.head_count_kv that differs between layers"),
    ],
)
def test_refused_features(tmp_path: Path, metadata: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        config_with(tmp_path, **metadata)


@pytest.mark.parametrize(
    "metadata, error, message",
    [
        ({"embedding_length_per_layer_input": 256}, UnsupportedModel, "an embedding for each layer"),
        ({"attention__shared_kv_layers": 20}, UnsupportedModel, "last 20 layers attend to the keys"),
        ({"attention__head_count_kv": [2, 2]}, CorruptCheckpoint, "head_count_kv must be 3 positive numbers"),
        ({"attention__head_count_kv": [2, 0, 2]}, CorruptCheckpoint, "must be 3 positive numbers"),
        ({"attention__sliding_window_pattern": [True]}, CorruptCheckpoint, "must be 3 times true or false"),
        ({"attention__sliding_window_pattern": 0}, CorruptCheckpoint, "pattern must be at least 1"),
        ({"expert_count": 128}, UnsupportedModel, "mixture of experts"),
    ],
)
def test_what_not_every_gemma4_has(
    metadata: dict[str, object], error: type[ModelError], message: str, tmp_path: Path
) -> None:
    config = transformers.Qwen3Config(**SHAPE, head_dim=8)
    path = gguf_files.write_bare(tmp_path / "x.gguf", config, "gemma4", **metadata)
    with pytest.raises(error, match=message):
        open_checkpoint(path)


def test_granites_numbers_must_be_positive(tmp_path: Path) -> None:
    path = gguf_files.write_bare(tmp_path / "x.gguf", architecture="granite", residual_scale=0.0)
    with pytest.raises(CorruptCheckpoint, match="residual_scale must be positive"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "architecture, why",
    [
        ("mamba", ": a recurrent state cannot be evicted token by token"),
        ("mistral", ""),
        ("granitehybrid", ": a recurrent state cannot be evicted token by token"),
        ("phimoe", ": this network has no router for a mixture of experts"),
        ("gpt-oss", ": this network has no router for a mixture of experts"),
    ],
)
def test_refused_architecture(architecture: str, why: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", architecture)
    writer.add_tensor("token_embd.weight", np.zeros((5, 32), dtype=np.float32))
    with pytest.raises(
        UnsupportedModel, match=f"'{architecture}' is not supported{why}; supported families: llama"
    ):
        open_checkpoint(gguf_files.finish(writer, tmp_path / "x.gguf"))


def test_missing_embedding(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    gguf_files.add_geometry(writer, gguf_files.LLAMA)
    with pytest.raises(CorruptCheckpoint, match=r"token_embd.weight is missing"):
        open_checkpoint(gguf_files.finish(writer, tmp_path / "x.gguf"))

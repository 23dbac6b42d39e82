"""Tiny random checkpoints, written to real files and loaded through the real readers."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from kakeya import kernels as native
from kakeya.config import CacheConfig, EngineConfig
from kakeya.engine.cpu.backend import CpuBackend
from kakeya.engine.engine import Engine
from kakeya.engine.proposer import Proposer
from kakeya.engine.slab import SlabPool, slab_geometry
from kakeya.models.checkpoint import open_checkpoint
from kakeya.models.decoder import Decoder
from kakeya.models.loader import load_decoder
from kakeya.types import DType, KernelChoice, Numerics, WeightFormat

VOCAB = 61
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 100.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_llama(directory: Path, seed: int = 0, **changes: object) -> Path:
    """A random Llama checkpoint whose next-token distributions are well spread."""
    config = LLAMA | changes
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    key = config["num_key_value_heads"] * config["head_dim"]

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * 1.5 / columns**0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(config["vocab_size"], hidden, generator=generator),
        "model.norm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.self_attn.q_proj.weight": random(query, hidden),
            f"{prefix}.self_attn.k_proj.weight": random(key, hidden),
            f"{prefix}.self_attn.v_proj.weight": random(key, hidden),
            f"{prefix}.self_attn.o_proj.weight": random(hidden, query),
            f"{prefix}.mlp.gate_proj.weight": random(inner, hidden),
            f"{prefix}.mlp.up_proj.weight": random(inner, hidden),
            f"{prefix}.mlp.down_proj.weight": random(hidden, inner),
            f"{prefix}.input_layernorm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
            f"{prefix}.post_attention_layernorm.weight": 1 + 0.1 * torch.randn(hidden, generator=generator),
        }
    save_file(tensors, directory / "model.safetensors")
    return directory


def engine_config(sink: int = 2, window: int = 8, spare: int = 4, **changes: object) -> EngineConfig:
    """Small shapes, float32, torch kernels: what a test compares with the oracle."""
    base = EngineConfig(
        cache=CacheConfig(sink, window, spare),
        capacity=4,
        numerics=Numerics.FAST,
        dtype=DType.FLOAT32,
        weights=WeightFormat.FLOAT32,
        kernels=KernelChoice.TORCH,
        threads=2,
        prefill_block=8,
        max_batch_tokens=32,
    )
    return replace(base, **changes)


def load(directory: Path, config: EngineConfig) -> Decoder:
    return load_decoder(
        open_checkpoint(directory),
        dtype=config.dtype,
        weights=config.weights,
        numerics=config.numerics,
        kernels=native.load(config.kernels),
    )


def make_backend(decoder: Decoder, config: EngineConfig, fingerprint: str = "tiny") -> CpuBackend:
    pool = SlabPool(slab_geometry(decoder.config, config), config.capacity)
    return CpuBackend(decoder, pool, config.numerics, native.load(config.kernels), fingerprint)


def make_engine(decoder: Decoder, config: EngineConfig, proposer: Proposer | None = None) -> Engine:
    return Engine(make_backend(decoder, config), config, proposer).start()

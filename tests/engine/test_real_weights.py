"""The default model's real weights in float32, past several wraps: every engine says what the oracle says."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kakeya.config import CacheConfig, EngineConfig
from kakeya.engine.backends import CUDA, open_backend
from kakeya.engine.engine import Engine
from kakeya.models.blocks import BlockTensor
from kakeya.models.checkpoint import Checkpoint, open_checkpoint
from kakeya.text import Tokenizer
from kakeya.types import BackendChoice, DType, KernelChoice, WeightFormat
from support.engines import GREEDY, say
from support.reference import Oracle
from support.tiny import make_device_backend

SINK, WINDOW = 4, 20
CONFIG = EngineConfig(
    backend=BackendChoice.CPU,
    cache=CacheConfig(SINK, WINDOW, 4),
    capacity=2,
    dtype=DType.FLOAT32,
    weights=WeightFormat.FLOAT32,
    kernels=KernelChoice.TORCH,
)
TEXT = "The river rose in the night. By morning the lower fields were under water, and the old bridge, which"
ANSWER = 32


@pytest.fixture(
    params=["cpu", "device on a cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def engine(request: pytest.FixtureRequest, default_model: Path) -> Iterator[Engine]:
    if request.param == "cpu":
        backend = open_backend(open_checkpoint(default_model), CONFIG).backend
    elif request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    else:
        device = CUDA if request.param == "cuda" else torch.device("cpu")
        backend = make_device_backend(default_model, CONFIG, device)
    engine = Engine(backend, CONFIG).start()
    yield engine
    engine.shutdown()


@pytest.fixture(scope="module")
def checkpoint(default_model: Path) -> Checkpoint:
    return open_checkpoint(default_model)


@pytest.fixture(scope="module")
def real_oracle(checkpoint: Checkpoint) -> Oracle:
    model = checkpoint.config
    names = ["model.embed_tokens", "model.norm"] + [
        f"model.layers.{layer}.{name}"
        for layer in range(model.num_layers)
        for name in (
            "input_layernorm",
            *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")),
            "post_attention_layernorm",
            *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
        )
    ]
    config = {
        "rms_norm_eps": model.norm_eps,
        "head_dim": model.head_dim,
        "num_hidden_layers": model.num_layers,
        "rope_theta": model.layer_ropes[0].theta,
    }
    return Oracle(config, {f"{name}.weight": _float32(checkpoint, f"{name}.weight") for name in names})


def _float32(checkpoint: Checkpoint, name: str) -> Tensor:
    stored = checkpoint.tensor(name)
    return stored.dequantize() if isinstance(stored, BlockTensor) else stored.float()


def test_mlx_says_in_float32_what_the_cpu_says(default_model: Path, checkpoint: Checkpoint) -> None:
    """The file's own integers, multiplied by MLX, against the same numbers as floats in torch."""
    prompt = Tokenizer(checkpoint.tokenizer_files()).encode(TEXT)
    said = []
    for backend in (BackendChoice.CPU, BackendChoice.MLX):
        config = replace(CONFIG, backend=backend, weights=WeightFormat.AUTO)
        engine = Engine(open_backend(open_checkpoint(default_model), config).backend, config).start()
        try:
            said.append(say(engine, engine.open("reader", []), prompt, ANSWER, GREEDY))
        finally:
            engine.shutdown()
    assert said[0] == said[1]
    assert len(prompt) + ANSWER > 2 * (SINK + WINDOW)


def test_greedy_tokens_are_the_oracles(engine: Engine, checkpoint: Checkpoint, real_oracle: Oracle) -> None:
    prompt = Tokenizer(checkpoint.tokenizer_files()).encode(TEXT)
    sequence = engine.open("reader", [])
    said = say(engine, sequence, prompt, ANSWER, GREEDY)
    assert len(prompt) + len(said) > 2 * (SINK + WINDOW)
    logits = real_oracle.logits([*prompt, *said[:-1]], SINK, WINDOW)
    assert logits[len(prompt) - 1 :].argmax(-1).tolist() == said

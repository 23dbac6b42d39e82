"""Families with local layers, softcaps and several ropes, past the wrap."""

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from kakeya.config import EngineConfig
from kakeya.models.decoder import Decoder
from kakeya.types import KernelChoice, Numerics
from support import families, tiny
from support.oracle import pair_attention

SHAPE = families.SHAPE | {"head_dim": 16, "num_hidden_layers": 4}
CONFIGS = {
    "gemma2": transformers.Gemma2Config(**SHAPE, sliding_window=5, query_pre_attn_scalar=24),
    "gemma3": transformers.Gemma3TextConfig(**SHAPE, sliding_window=5, sliding_window_pattern=2),
    "gemma2-wide": transformers.Gemma2Config(**SHAPE, sliding_window=11),
    "mistral": transformers.MistralConfig(**SHAPE, sliding_window=7),
    "qwen3": transformers.Qwen3Config(**SHAPE),
    "qwen2": transformers.Qwen2Config(**families.SHAPE),
}


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    families.save_random(CONFIGS[request.param], directory)
    return directory


@torch.inference_mode()
def whole_history_logits(decoder: Decoder, tokens: list[int], sink: int, window: int) -> Tensor:
    """The decoder over every token at once, each pair of tokens seen by the oracle's rules."""
    model = decoder.config

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return pair_attention(
            q,
            k,
            v,
            model.layer_ropes[layer].theta,
            sink,
            window,
            scale=model.query_scale,
            softcap=model.attention_softcap,
            local=model.layer_windows[layer],
        )

    return decoder.logits(decoder.forward(torch.tensor(tokens), attend))


@pytest.mark.parametrize("kernels", [KernelChoice.TORCH, KernelChoice.NATIVE])
@pytest.mark.parametrize("numerics", list(Numerics))
def test_every_family_stays_exact_past_the_wrap(
    checkpoint: Path, kernels: KernelChoice, numerics: Numerics
) -> None:
    config: EngineConfig = tiny.engine_config(kernels=kernels, numerics=numerics)
    decoder = tiny.load(checkpoint, config)
    tokens = torch.randint(3, families.VOCAB, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = whole_history_logits(decoder, tokens, 2, 8)
    engine = tiny.make_engine(decoder, config)
    try:
        computed = engine.score(tokens)
    finally:
        engine.shutdown()
    assert (computed - expected).abs().max() < 1e-3
    assert torch.equal(computed.argmax(-1), expected.argmax(-1))

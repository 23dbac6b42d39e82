"""Families with local layers, softcaps, several ropes, partial ones and none, past the wrap."""

import math
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from kakeya.config import EngineConfig
from kakeya.models.config import ModelConfig
from kakeya.models.decoder import Decoder
from kakeya.models.rope import inverse_frequencies
from kakeya.types import KernelChoice, Numerics
from support import families, tiny
from support.oracle import pair_attention

CONFIGS = families.BOUNDED | {
    "gemma2-wide": transformers.Gemma2Config(**families.BOUNDED_SHAPE, sliding_window=11)
}


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    families.save_random(CONFIGS[request.param], directory)
    return directory


def temperatures(model: ModelConfig, length: int, capacity: int) -> Tensor:
    """Of a query at each position: in a full cache, all sit at its end."""
    if model.query_temperature is None:
        return torch.ones(length)
    beta, positions = model.query_temperature.beta, model.query_temperature.positions
    seen_at = [min(position, capacity - 1) for position in range(length)]
    return torch.tensor([1 + beta * math.log(1 + position // positions) for position in seen_at])


@torch.inference_mode()
def whole_history_logits(decoder: Decoder, tokens: list[int], sink: int, window: int) -> Tensor:
    """The decoder over every token at once, each pair of tokens seen by the oracle's rules."""
    model = decoder.config

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rope = model.layer_ropes[layer].within(sink + window)
        frequencies = torch.tensor(inverse_frequencies(rope))
        return pair_attention(
            q * temperatures(model, len(tokens), sink + window)[:, None, None],
            k,
            v,
            rope.theta,
            sink,
            window,
            scale=model.query_scale,
            softcap=model.attention_softcap,
            local=model.layer_windows[layer],
            frequencies=frequencies,
            growth=torch.where(frequencies > 0, rope.attention_factor, 1.0),
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

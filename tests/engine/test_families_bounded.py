"""Families with local layers, softcaps, several ropes, partial ones and none, past the wrap."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from kakeya.config import EngineConfig
from kakeya.errors import ConfigError
from kakeya.models.config import ModelConfig
from kakeya.models.decoder import Decoder
from kakeya.models.rope import inverse_frequencies
from kakeya.sessions.state_files import read_state, write_state
from kakeya.types import BackendChoice, Numerics
from support import families, tiny
from support.engines import FunctionProposer, say
from support.reference import pair_attention

CONFIGS = families.BOUNDED | {
    "gemma4": transformers.Gemma4TextConfig(
        **families.GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True
    ),
    "gemma2-wide": transformers.Gemma2Config(**families.BOUNDED_SHAPE, sliding_window=11),
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


@pytest.mark.parametrize("computer", tiny.COMPUTERS)
@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.slow
def test_every_family_stays_exact_past_the_wrap(checkpoint: Path, computer: str, numerics: Numerics) -> None:
    config: EngineConfig = tiny.engine_config(numerics=numerics, **tiny.COMPUTERS[computer])
    decoder = tiny.load(checkpoint, replace(config, backend=BackendChoice.CPU))
    assert isinstance(decoder, Decoder)
    if computer == "mlx" and decoder.config.layer_heads:
        with pytest.raises(ConfigError, match="gemma4 models, whose layers have heads of different sizes"):
            tiny.load(checkpoint, config)
        return
    tokens = torch.randint(3, families.VOCAB, (50,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = whole_history_logits(decoder, tokens, 2, 8)
    engine = tiny.make_engine(decoder if computer != "mlx" else tiny.load(checkpoint, config), config)
    try:
        computed = engine.score(tokens)
    finally:
        engine.shutdown()
    assert (computed - expected).abs().max() < 1e-3
    assert torch.equal(computed.argmax(-1), expected.argmax(-1))


def test_a_session_of_mixed_heads_survives_files_forks_and_rejected_drafts(tmp_path: Path) -> None:
    """Slots are copied one by one there, and lie elsewhere in layers with heads of another size."""
    directory = tmp_path / "gemma4"
    families.save_random(CONFIGS["gemma4"], directory)
    config = tiny.engine_config()
    decoder = tiny.load(directory, config)
    wrong = FunctionProposer(lambda tokens: [(tokens[-1] + 1) % families.VOCAB] * 3)
    engine, drafting = tiny.make_engine(decoder, config), tiny.make_engine(decoder, config, wrong)
    try:
        said = []
        for each in (engine, drafting):
            sequence = each.open("someone", [])
            said.append(say(each, sequence, [5, 9, 22, 13, 7] * 5, 6))
            write_state(tmp_path / "state", each.export_state(sequence))
            geometry = each.read(sequence, lambda s: s.slab.geometry)
            restored = each.import_state(read_state(tmp_path / "state", "tiny", geometry), "someone")
            fork = each.fork(sequence)
            said += [say(each, one, [4, 6], 6) for one in (sequence, restored, fork)]
    finally:
        engine.shutdown()
        drafting.shutdown()
    assert said[1] == said[2] == said[3]
    assert said[:4] == said[4:]

"""Settings of a training: what cannot work is named."""

from dataclasses import replace

import pytest

from kakeya.errors import ConfigError
from kakeya.models.config import LayerHeads
from kakeya.training.settings import DataSettings, NetworkSettings, TrainingSettings, default_taps
from support.tiny import parse_config


@pytest.mark.parametrize(
    "layers, taps",
    [
        (30, (2, 9, 16, 23, 29)),
        (28, (2, 9, 15, 21, 27)),
        (6, (1, 2, 3, 4, 5)),
        (2, (0, 1)),
        (5, (0, 1, 2, 3, 4)),
    ],
)
def test_taps_are_spread_from_an_early_layer_to_the_last(layers: int, taps: tuple[int, ...]) -> None:
    assert default_taps(layers) == taps


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: DataSettings(conversations=7), "conversations must be at least 8, got 7"),
        (lambda: DataSettings(tokens=31), "conversation-tokens must be at least 32"),
        (lambda: DataSettings(seed=-1), "seed must be from 0 to 2147483647, got -1"),
        (lambda: DataSettings(seed=2**31), "seed must be from 0 to 2147483647"),
        (lambda: NetworkSettings(kind="both"), "kind must be steps or block, got 'both'"),  # type: ignore[arg-type]
        (lambda: NetworkSettings(block=1), "block must be at least 2"),
        (lambda: NetworkSettings(layers=0), "layers must be at least 1"),
        (lambda: NetworkSettings(width=0), "width must be at least 1"),
        (lambda: NetworkSettings(draft_vocab=0), "draft-vocab must be at least 1"),
        (lambda: TrainingSettings(steps=5, minutes=1.0), "either steps or minutes"),
        (lambda: TrainingSettings(steps=None), "either steps or minutes"),
        (lambda: TrainingSettings(steps=0), "steps must be at least 1"),
        (lambda: TrainingSettings(steps=None, minutes=0.0), "minutes must be above 0"),
        (lambda: TrainingSettings(batch=0), "batch must be at least 1"),
        (lambda: TrainingSettings(held_out=0), "held-out must be at least 1"),
        (lambda: TrainingSettings(learning_rate=0.0), "learning-rate must be between 0 and 1"),
    ],
)
def test_what_cannot_work_is_named(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_the_network_has_the_heads_of_its_verifier() -> None:
    model = parse_config()
    steps = NetworkSettings().config_for(model, "it")
    assert (steps.kind, steps.layers, steps.block, steps.taps) == ("steps", 1, 8, (0, 1, 2, 3))
    steps.check_fits(model)
    assert NetworkSettings("block", 16).config_for(model, "it").layers == 3
    assert NetworkSettings("block", 16, 5).config_for(model, "it").layers == 5
    assert (steps.intermediate_size, steps.draft_vocab_size) == (model.intermediate_size, model.vocab_size)
    narrow = NetworkSettings(width=48, draft_vocab=20).config_for(model, "it")
    assert (narrow.intermediate_size, narrow.draft_vocab_size) == (48, 20)


def test_layers_with_other_heads_are_refused() -> None:
    model = parse_config()
    mixed = replace(model, layer_heads=(LayerHeads(model.num_kv_heads, model.head_dim),) * model.num_layers)
    with pytest.raises(
        ConfigError, match="whose layers have heads of different sizes, cannot have a drafter"
    ):
        NetworkSettings().config_for(mixed, "it")

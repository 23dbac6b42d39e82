"""What a model is loaded with."""

from pathlib import Path

import pytest

from kakeya.config import EngineConfig
from kakeya.engine.shared_prefixes import GRANULE
from kakeya.loading import load_model
from kakeya.types import KernelChoice, Numerics
from support import serving


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return serving.write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("settings", "block", "granule"),
    [
        ({}, 32, 32),
        ({"capacity": 1}, 128, 128),
        ({"prefill_block": 64}, 64, 64),
        ({"max_stall_ms": 0}, 128, 128),
        ({"numerics": Numerics.EXACT}, 128, GRANULE),
    ],
)
def test_where_torch_computes_a_block_and_a_granule_are_one_and_small(
    model: Path, settings: dict[str, object], block: int, granule: int
) -> None:
    loaded = load_model(str(model), EngineConfig(**{"kernels": KernelChoice.TORCH, "capacity": 2} | settings))
    assert (loaded.config.block_tokens, loaded.backend.pool.granule) == (block, granule)

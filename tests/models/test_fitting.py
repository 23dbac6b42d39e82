from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kakeya.config import CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from kakeya.models import fitting
from kakeya.models.fitting import Geometry, MemoryNeed, available_memory, check_fits, memory_need
from kakeya.types import BackendChoice, DType, WeightFormat

SHAPE = Geometry(
    layers=2, kv_heads=3, head_dim=64, hidden=100, vocabulary=1000, parameters=1_000_000, tied_head=True
)
CPU = EngineConfig(backend=BackendChoice.CPU, cache=CacheConfig(sink=4, window=80, spare=16))


def test_available_memory_is_what_the_system_says(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 24000 kB\nMemAvailable:   5000 kB\n")
    assert available_memory(meminfo) == 5000 * 1024
    meminfo.write_text("nothing of the kind\n")
    physical = available_memory(meminfo)
    assert available_memory(tmp_path / "absent") == physical > 2**28


def test_parameters_that_a_token_meets() -> None:
    own_head = Geometry(2, 3, 64, 100, 1000, 1_000_000, tied_head=False)
    assert (SHAPE.token_parameters, SHAPE.prompt_parameters) == (1_000_000, 900_000)
    assert (own_head.token_parameters, own_head.prompt_parameters) == (900_000, 800_000)


def test_memory_is_weights_slab_and_process() -> None:
    need = memory_need(SHAPE, 500_000, CPU)
    assert need.weights == 550_000
    assert need.slab == 2 * 2 * 3 * 64 * 2 * 100
    assert need.total == need.weights + need.slab + fitting.PROCESS_BYTES
    on_mlx = memory_need(SHAPE, 500_000, replace(CPU, backend=BackendChoice.MLX))
    assert on_mlx.weights == 675_000, "its scales have 32 bits"
    assert str(need) == (
        "weights 550,000 + a session's slab 153,600 + the process 350,000,000 = 350,703,600 bytes"
    )


@pytest.mark.parametrize(
    "weights, held", [("native", 550_000), ("bf16", 2_000_000), ("float32", 4_000_000), ("int4", 625_000)]
)
def test_weights_in_another_format(weights: str, held: int) -> None:
    config = EngineConfig(weights=WeightFormat(weights), dtype=DType.FLOAT32, cache=CPU.cache)
    need = memory_need(SHAPE, 500_000, config)
    assert need.weights == held
    assert need.slab == 2 * 153_600


@pytest.mark.parametrize(
    "backend, has_device, refused",
    [("cpu", True, True), ("auto", False, True), ("auto", True, False), ("cuda", True, False)],
)
def test_only_main_memory_is_checked_here(
    backend: str, has_device: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)
    monkeypatch.setattr(fitting, "available_memory", lambda: 100)
    config, need = EngineConfig(backend=BackendChoice(backend)), MemoryNeed(weights=90, slab=10, process=1)
    if refused:
        with pytest.raises(ConfigError, match="m does not fit in memory: weights 90 .* = 101 bytes, and 100"):
            check_fits("m", need, config)
    else:
        check_fits("m", need, config)


def test_what_just_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "available_memory", lambda: 101)
    check_fits("m", MemoryNeed(weights=90, slab=10, process=1), CPU)

"""`--backend mlx` from the door: what it says of itself, what it needs, and what it refuses."""

import sys
from pathlib import Path

import mlx.core as mx
import pytest

from kakeya.engine.backends import chosen_backend, held_bytes, room_for_sessions
from kakeya.engine.mlx.weights import mlx_weight_bytes
from kakeya.errors import ConfigError
from kakeya.models.checkpoint import open_checkpoint
from kakeya.options import ComputeOptions
from kakeya.types import BackendChoice, Numerics, WeightFormat
from support import gguf_files, tiny

CONFIG = tiny.engine_config(backend=BackendChoice.MLX, threads=1)


def test_a_runtime_over_mlx_says_so(tiny_llama: Path) -> None:
    with tiny.tiny_runtime(tiny_llama, CONFIG) as runtime:
        facts = runtime.describe()
        session = tiny.new_session(runtime)
        answer = tiny.answer(runtime, session, 3)
    assert (facts.backend, facts.weights) == ("mlx", "float32 (layers), float32 (head)")
    assert facts.kernels.startswith("mlx 0.")
    assert facts.pool_bytes == CONFIG.capacity * facts.session_bytes
    assert len(answer) == 4


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("kakeya.engine.mlx.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    with pytest.raises(
        ConfigError, match=r"--backend mlx needs the package mlx .* pip install 'kakeya\[mlx\]'"
    ):
        chosen_backend(CONFIG)
    with pytest.raises(ConfigError, match=r"kakeya\[mlx\]"):
        ComputeOptions(backend=BackendChoice.MLX).engine_config()


def test_exact_is_taken_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    asked = tiny.engine_config(backend=BackendChoice.MLX, numerics=Numerics.EXACT)
    assert chosen_backend(asked) == asked


def test_room_for_sessions_is_what_the_weights_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(gguf_files.write_mixed(tmp_path / "mixed.gguf"))
    config = tiny.engine_config(backend=BackendChoice.MLX, weights=WeightFormat.AUTO)
    weights = mlx_weight_bytes(checkpoint, dtype=config.dtype, weights=config.weights)
    assert held_bytes(checkpoint, config) == weights
    monkeypatch.setattr("kakeya.engine.backends.free_memory", lambda device: weights + 1000)
    assert room_for_sessions(checkpoint, config, 4) == 1000

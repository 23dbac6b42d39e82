"""How MLX holds a model: what it says, what it takes and what it refuses."""

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from kakeya.engine.mlx.weights import MlxWeights, load_mlx_weights, mlx_weight_bytes
from kakeya.errors import ConfigError
from kakeya.models.checkpoint import Checkpoint, open_checkpoint
from kakeya.types import DType, WeightFormat
from support import families, gguf_files, tiny


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write_mixed(tmp_path_factory.mktemp("mixed") / "mixed.gguf")


def taken(weights: MlxWeights) -> int:
    """Bytes of all matrices, without biases."""

    def of(matrix: object) -> int:
        if hasattr(matrix, "parts"):
            return sum(map(of, matrix.parts))
        return sum(value.nbytes for value in vars(matrix).values() if isinstance(value, mx.array))

    layers = [
        getattr(layer, name) for layer in weights.layers for name in ("qkv", "output", "gate_up", "down")
    ]
    head = [] if weights.config.tied_head else [weights.head]
    return of(weights.embedding) + sum(of(linear.matrix) for linear in (*layers, *head))


@pytest.mark.parametrize("weights", list(WeightFormat))
@pytest.mark.parametrize("dtype", list(DType))
def test_the_memory_for_weights_is_known_before_they_are_loaded(
    mixed: Path, tiny_llama: Path, weights: WeightFormat, dtype: DType
) -> None:
    for path in (mixed, tiny_llama):
        checkpoint = open_checkpoint(path)
        planned = mlx_weight_bytes(checkpoint, dtype=dtype, weights=weights)
        assert planned == taken(load_mlx_weights(checkpoint, dtype=dtype, weights=weights))


def described(checkpoint: Checkpoint, dtype: DType, weights: WeightFormat) -> tuple[str, str]:
    loaded = load_mlx_weights(checkpoint, dtype=dtype, weights=weights)
    return loaded.description, loaded.numbers


def test_what_is_not_held_as_the_file_has_it_is_said(mixed: Path) -> None:
    checkpoint = open_checkpoint(mixed)
    held, numbers = described(checkpoint, DType.BFLOAT16, WeightFormat.AUTO)
    assert "Q6_K held as bf16" in held
    assert numbers == held, "rounded to bf16 they are other numbers"
    held, numbers = described(checkpoint, DType.FLOAT32, WeightFormat.NATIVE)
    assert "Q6_K held as float32" in held
    assert "held as" not in numbers, "in float32 they are the file's"
    assert described(checkpoint, DType.FLOAT32, WeightFormat.BF16)[0].count("held as float32") == 2
    assert described(checkpoint, DType.FLOAT32, WeightFormat.INT4)[0] == "int4 (layers), int4 (head)"


def test_heads_of_different_sizes_are_refused_by_name(tmp_path: Path) -> None:
    import transformers

    config = transformers.Gemma4TextConfig(
        **families.GEMMA4, num_global_key_value_heads=1, attention_k_eq_v=True
    )
    families.save_random(config, tmp_path)
    refusal = pytest.raises(
        ConfigError, match="gemma4 models, whose layers have heads .* choose --backend cpu"
    )
    for ask in (load_mlx_weights, mlx_weight_bytes):
        with refusal:
            ask(open_checkpoint(tmp_path), dtype=DType.FLOAT32, weights=WeightFormat.AUTO)


@pytest.mark.parametrize("part", ["value_norm", "layer_scalars"])
def test_parts_that_the_decoder_lacks_are_refused(
    tiny_llama: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = open_checkpoint(tiny_llama)
    monkeypatch.setattr(checkpoint, "config", replace(checkpoint.config, **{part: True}))
    with pytest.raises(ConfigError, match="normed values or scalars, do not run on mlx"):
        load_mlx_weights(checkpoint, dtype=DType.FLOAT32, weights=WeightFormat.AUTO)


def test_a_tied_head_is_the_embedding(tiny_llama: Path) -> None:
    weights = load_mlx_weights(open_checkpoint(tiny_llama), dtype=DType.FLOAT32, weights=WeightFormat.AUTO)
    assert weights.head.matrix is weights.embedding
    assert weights.num_parameters == tiny.load(tiny_llama, tiny.engine_config()).num_parameters

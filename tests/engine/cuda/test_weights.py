"""Weights of GGUF's block formats on a device: which numbers, in how much memory, and what they say."""

from pathlib import Path

import pytest
import torch
import transformers

from kakeya.config import EngineConfig
from kakeya.engine.cuda import weights as weights_module
from kakeya.engine.cuda.memory import device_memory
from kakeya.engine.cuda.weights import LOADING_BYTES, DeviceWeights, load_weights
from kakeya.engine.engine import Engine
from kakeya.models.blocks import BlockTensor
from kakeya.models.checkpoint import Checkpoint, open_checkpoint
from kakeya.models.tensors import ModelTensors, Stored, as_float
from kakeya.types import BackendChoice, DType, WeightFormat
from support import gguf_files, tiny
from support.engines import GREEDY, say
from support.tiny import make_device_backend

CPU = torch.device("cpu")
WITH_A_DEVICE = [
    CPU,
    pytest.param(
        torch.device("cuda", 0),
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
ON_DEVICE = WITH_A_DEVICE[1:]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.write_mixed(tmp_path_factory.mktemp("mixed") / "mixed.gguf")


def loaded(checkpoint: Checkpoint, device: torch.device, dtype: DType = DType.BFLOAT16) -> DeviceWeights:
    return load_weights(checkpoint, dtype=dtype, weights=WeightFormat.AUTO, device=device)


def matrices_of(weights: DeviceWeights) -> list[torch.Tensor]:
    layers = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in weights.layers]
    return [weights.embedding, *(matrix.weight for layer in layers for matrix in layer)]


def expected_matrices(checkpoint: Checkpoint, dtype: torch.dtype) -> list[torch.Tensor]:
    tensors = ModelTensors(checkpoint)
    layers = [tensors.layer(index) for index in range(checkpoint.config.num_layers)]
    stored = [(layer.qkv, layer.output, layer.gate_up, layer.down) for layer in layers]
    matrices = [tensors.embedding(), *(matrix for layer in stored for matrix in layer)]
    assert all(isinstance(part, BlockTensor) for matrix in matrices for part in matrix.parts)
    return [torch.cat([as_float(part, dtype) for part in matrix.parts]) for matrix in matrices]


@pytest.mark.parametrize("device", WITH_A_DEVICE, ids=str)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("slice_elements", [1000, 1 << 22])
def test_every_format_becomes_its_own_numbers(
    mixed: Path, dtype: DType, device: torch.device, slice_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_module, "DEVICE_SLICE_ELEMENTS", slice_elements)
    found = loaded(open_checkpoint(mixed), device, dtype)
    assert {matrix.device.type for matrix in matrices_of(found)} == {device.type}
    expected = expected_matrices(open_checkpoint(mixed), found.dtype)
    for ours, theirs in zip(matrices_of(found), expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)


def test_tensors_travel_in_slices_as_the_file_has_them(mixed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "DEVICE_SLICE_ELEMENTS", 4096)
    slices: list[Stored] = []

    def noting(stored: Stored, dtype: torch.dtype) -> torch.Tensor:
        slices.append(stored)
        return as_float(stored, dtype)

    monkeypatch.setattr(weights_module, "as_float", noting)
    found = loaded(open_checkpoint(mixed), CPU)
    assert all(isinstance(some, BlockTensor) for some in slices)
    assert max(some.shape[0] * some.shape[1] for some in slices) == 4096
    assert sum(some.shape[0] * some.shape[1] for some in slices) == sum(
        matrix.numel() for matrix in matrices_of(found)
    )


def test_loading_takes_less_than_running(mixed: Path) -> None:
    config = EngineConfig(backend=BackendChoice.CUDA, capacity=1)
    memory = device_memory(open_checkpoint(mixed).config, config)
    assert memory.graphs >= LOADING_BYTES


@pytest.mark.parametrize("device", WITH_A_DEVICE, ids=str)
def test_greedy_tokens_are_the_cpu_engines(mixed: Path, device: torch.device) -> None:
    config = tiny.engine_config(dtype=DType.FLOAT32, weights=WeightFormat.FLOAT32)
    said = []
    for engine in (
        tiny.make_engine(tiny.load(mixed, config), config),
        Engine(make_device_backend(mixed, config, device), config).start(),
    ):
        sequence = engine.open("reader", [])
        said.append(say(engine, sequence, [5, 9, 22, 13, 7, 41, 60], 40, GREEDY))
        engine.shutdown()
    assert said[0] == said[1]
    assert len(set(said[0])) > 5  # not the same word again and again


@pytest.mark.parametrize("device", ON_DEVICE, ids=str)
@pytest.mark.parametrize("dtype", DType)
def test_loading_keeps_to_its_bound(tmp_path: Path, device: torch.device, dtype: DType) -> None:
    """Matrices of several slices, in the formats that take the most."""
    config = transformers.LlamaConfig(
        **gguf_files.MIXED.to_dict() | {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 512}
    )
    checkpoint = open_checkpoint(gguf_files.write_mixed(tmp_path / "large.gguf", config))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    held = loaded(checkpoint, device, dtype)
    kept = torch.cuda.memory_allocated(device) - before
    peak = torch.cuda.max_memory_allocated(device) - before
    assert kept >= sum(matrix.nbytes for matrix in matrices_of(held))
    assert peak <= kept + LOADING_BYTES

"""A model's weights on the device: dense, in one element type, loaded one matrix at a time."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakeya.errors import ConfigError
from kakeya.models.blocks import DEVICE_SLICE_ELEMENTS, row_slices
from kakeya.models.checkpoint import Checkpoint
from kakeya.models.config import ModelConfig
from kakeya.models.float_types import FLOAT_NAMES, FLOAT_TYPES
from kakeya.models.layer import Layer
from kakeya.models.tensors import ModelTensors, Stored, StoredMatrix, as_float
from kakeya.types import DType, WeightFormat

# While a slice of rows is dequantized: its bytes, integers and float32 numbers, and the result.
LOADING_BYTES = 24 * DEVICE_SLICE_ELEMENTS


@dataclass(frozen=True, slots=True)
class Matrix:
    """x @ weight.T + bias, all in the element type."""

    weight: Tensor  # [N, K]
    bias: Tensor | None = None

    @property
    def outputs(self) -> int:
        return self.weight.shape[0]


DeviceLayer = Layer[Matrix]


@dataclass(frozen=True)
class DeviceWeights:
    """A whole model on a device. A tied head is the embedding itself."""

    config: ModelConfig
    embedding: Tensor
    layers: Sequence[DeviceLayer]
    final_norm: Tensor
    head: Matrix
    num_parameters: int
    description: str

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def is_plain(self) -> bool:
        """No biases and no norms after a block: then the GEMV of a single row can fuse the rest."""
        return not any(
            layer.post_attention_norm is not None
            or layer.post_mlp_norm is not None
            or any(matrix.bias is not None for matrix in layer.matrices.values())
            for layer in self.layers
        )


def load_weights(
    checkpoint: Checkpoint, *, dtype: DType, weights: WeightFormat, device: torch.device
) -> DeviceWeights:
    """Read, check and copy every tensor in the file's own format; the device dequantizes it.

    Beside the weights this takes at most LOADING_BYTES of the device, and no host memory if the file is
    mapped. Weights are held in `dtype`, like the cache; with bf16 weights under float32 they are rounded
    first. Raises ConfigError for a format that is not dense or a network that only runs on a CPU,
    CorruptCheckpoint for what the file lacks.
    """
    if checkpoint.config.layer_heads:
        raise ConfigError(
            f"{checkpoint.config.family} models, whose layers have heads of different sizes, do not run on "
            "cuda yet; choose --backend cpu"
        )
    moved = _Mover(checkpoint, FLOAT_TYPES[dtype], _rounded(dtype, weights), device).moved()
    torch.cuda.empty_cache()  # gives the memory of the slices back for the pool; does nothing without CUDA
    checkpoint.release()
    return moved


def _rounded(dtype: DType, weights: WeightFormat) -> torch.dtype:
    if weights in (WeightFormat.INT4, WeightFormat.INT8):
        raise ConfigError(f"weights={weights.value} is not available on cuda; use auto, bf16 or float32")
    if weights is WeightFormat.FLOAT32 and dtype is not DType.FLOAT32:
        raise ConfigError("weights=float32 needs dtype=float32 on cuda: a matmul has one element type")
    return torch.bfloat16 if weights is WeightFormat.BF16 else FLOAT_TYPES[dtype]


class _Mover:
    def __init__(
        self, checkpoint: Checkpoint, held: torch.dtype, rounded: torch.dtype, device: torch.device
    ) -> None:
        self._tensors = ModelTensors(checkpoint)
        self._config = checkpoint.config
        self._held, self._rounded, self._device = held, rounded, device

    def moved(self) -> DeviceWeights:
        embedding = self._matrix(self._tensors.embedding())
        layers = [self._layer(self._tensors.layer(index)) for index in range(self._config.num_layers)]
        final_norm = self._vector(self._tensors.final_norm())
        untied = self._tensors.untied_head()
        return DeviceWeights(
            config=self._config,
            embedding=embedding.weight,
            layers=layers,
            final_norm=final_norm,
            head=embedding if untied is None else self._matrix(untied),
            num_parameters=self._tensors.num_parameters,
            description=self._described(),
        )

    def _layer(self, stored: Layer[StoredMatrix]) -> DeviceLayer:
        return stored.map(lambda _, matrix: self._matrix(matrix), self._vector)

    def _matrix(self, stored: StoredMatrix) -> Matrix:
        weight = torch.empty(stored.shape, dtype=self._held, device=self._device)
        filled = 0
        for part in stored.parts:
            rows = part.shape[0]
            self._fill(weight[filled : filled + rows], part)
            filled += rows
        return Matrix(weight, None if stored.bias is None else stored.bias.to(self._device, self._held))

    def _fill(self, weight: Tensor, part: Stored) -> None:
        for some in row_slices((part.shape[0], part.shape[1]), DEVICE_SLICE_ELEMENTS):
            weight[some] = as_float(part[some].to(self._device), self._rounded)

    def _vector(self, vector: Tensor) -> Tensor:
        return vector.to(self._device)

    def _described(self) -> str:
        """Named as the CPU's decoder names them: slabs with the same numbers have the same name."""
        held, origin = FLOAT_NAMES[self._held], FLOAT_NAMES[self._rounded]
        name = held if held == origin else f"{origin} held as {held}"
        return f"{name} (layers), {name} (head)"

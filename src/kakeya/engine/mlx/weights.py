"""A model's weights as MLX arrays, loaded one matrix at a time."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import torch

from kakeya.engine.mlx.arrays import to_mlx
from kakeya.engine.mlx.matmul import (
    GROUPS_OF_32,
    DenseMatrix,
    Linear,
    Matrix,
    affine_of_blocks,
    affine_of_integers,
    stacked,
)
from kakeya.errors import ConfigError
from kakeya.models.blocks import BlockTensor
from kakeya.models.checkpoint import Checkpoint
from kakeya.models.config import ModelConfig
from kakeya.models.float_types import FLOAT_NAMES, FLOAT_TYPES
from kakeya.models.loader import as_integers
from kakeya.models.quantized import GROUP, Bits
from kakeya.models.tensors import ModelTensors, Stored, StoredMatrix, as_float
from kakeya.types import DType, WeightFormat

_ASKED_BITS: dict[WeightFormat, Bits] = {WeightFormat.INT4: 4, WeightFormat.INT8: 8}
_AS_STORED = (WeightFormat.AUTO, WeightFormat.NATIVE)
_GROUP_BYTES = 8  # a float32 scale and a float32 minimum


@dataclass(frozen=True)
class MlxLayer:
    """One layer's matrices and norms, as `models.layer.Layer` has them, without the scalar."""

    input_norm: mx.array | None
    qkv: Linear
    query_norm: mx.array | None
    key_norm: mx.array | None
    output: Linear
    post_attention_norm: mx.array | None
    mlp_norm: mx.array | None
    gate_up: Linear
    down: Linear
    post_mlp_norm: mx.array | None


@dataclass(frozen=True)
class MlxWeights:
    """A whole model. A tied head is the embedding itself."""

    config: ModelConfig
    embedding: Matrix
    layers: Sequence[MlxLayer]
    final_norm: mx.array
    head: Linear
    num_parameters: int
    description: str
    """How the matrices are held, for people."""
    numbers: str
    """Which numbers they are, however they are held: the same name for the same numbers on any backend."""


def load_mlx_weights(checkpoint: Checkpoint, *, dtype: DType, weights: WeightFormat) -> MlxWeights:
    """Read, check and copy every tensor.

    `weights`: native and auto keep the integers of quantized tensors whose groups are MLX's, and hold all
    others in `dtype`; float32 and bf16 round all of them to that; int8 and int4 quantize what is finer. A
    matrix whose columns do not make whole groups of 32 stays in `dtype`.
    Raises CorruptCheckpoint for what the file lacks, ConfigError for a network that MLX does not run here.
    """
    _check_supported(checkpoint.config)
    loaded = _Loader(checkpoint, _Forms(dtype, weights)).loaded()
    checkpoint.release()
    return loaded


def mlx_weight_bytes(checkpoint: Checkpoint, *, dtype: DType, weights: WeightFormat) -> int:
    """What the matrices of `load_mlx_weights` will take. Raises what it raises for what the file lacks."""
    _check_supported(checkpoint.config)
    tensors, forms = ModelTensors(checkpoint), _Forms(dtype, weights)
    matrices = [tensors.embedding(), tensors.untied_head()]
    for index in range(checkpoint.config.num_layers):
        matrices += tensors.layer(index).matrices.values()
    total = sum(forms.nbytes(part) for matrix in matrices if matrix is not None for part in matrix.parts)
    checkpoint.release()
    return total


def _check_supported(model: ModelConfig) -> None:
    if model.layer_heads or model.value_norm or model.layer_scalars:
        raise ConfigError(
            f"{model.family} models, whose layers have heads of different sizes, normed values or scalars, "
            "do not run on mlx yet; choose --backend cpu"
        )


@dataclass(frozen=True)
class _Form:
    """How a part of a matrix is held: in so many bits, or as floats where they are None."""

    bits: int | None
    name: str
    numbers: str


@dataclass(frozen=True)
class _Forms:
    """Decides how matrices are held."""

    dtype: DType
    weights: WeightFormat

    @property
    def held(self) -> torch.dtype:
        return torch.float32 if self.weights is WeightFormat.FLOAT32 else FLOAT_TYPES[self.dtype]

    @property
    def rounded(self) -> torch.dtype:
        """What floats are rounded to before they are held in a wider type."""
        return torch.bfloat16 if self.weights is WeightFormat.BF16 else self.held

    def of(self, stored: Stored) -> _Form:
        held, origin = FLOAT_NAMES[self.held], FLOAT_NAMES[self.rounded]
        bits = _ASKED_BITS.get(self.weights)
        if bits is not None and stored.shape[1] % GROUP == 0:
            return _Form(bits, f"int{bits}", f"int{bits}")
        if self.weights in _AS_STORED and isinstance(stored, BlockTensor):
            form = stored.format.name
            if stored.format in GROUPS_OF_32:
                return _Form(GROUPS_OF_32[stored.format][0], form, form)
            name = f"{form} held as {held}"
            return _Form(None, name, form if self.held == torch.float32 else name)
        name = held if held == origin else f"{origin} held as {held}"
        return _Form(None, name, name)

    def matrix(self, stored: Stored) -> Matrix:
        form = self.of(stored)
        if form.bits is None:
            return DenseMatrix(to_mlx(as_float(stored, self.rounded).to(self.held)))
        if self.weights in _ASKED_BITS:
            return affine_of_integers(as_integers(stored, _ASKED_BITS[self.weights]))
        assert isinstance(stored, BlockTensor)
        stored.check()
        return affine_of_blocks(stored)

    def nbytes(self, stored: Stored) -> int:
        elements, bits = stored.shape[0] * stored.shape[1], self.of(stored).bits
        if bits is None:
            return elements * self.held.itemsize
        return elements * bits // 8 + elements // GROUP * _GROUP_BYTES


class _Loader:
    def __init__(self, checkpoint: Checkpoint, forms: _Forms) -> None:
        self._tensors = ModelTensors(checkpoint)
        self._config = checkpoint.config
        self._forms = forms
        self._held: dict[str, list[_Form]] = {"layers": [], "head": []}

    def loaded(self) -> MlxWeights:
        is_tied = self._config.tied_head
        embedding = self._linear(self._tensors.embedding(), "head" if is_tied else "table").matrix
        layers = [self._layer(index) for index in range(self._config.num_layers)]
        untied = self._tensors.untied_head()
        return MlxWeights(
            config=self._config,
            embedding=embedding,
            layers=layers,
            final_norm=to_mlx(self._tensors.final_norm()),
            head=Linear(embedding) if untied is None else self._linear(untied, "head"),
            num_parameters=self._tensors.num_parameters,
            description=self._described("name"),
            numbers=self._described("numbers"),
        )

    def _layer(self, index: int) -> MlxLayer:
        stored = self._tensors.layer(index)
        parts: dict[str, Any] = {}
        for field in fields(MlxLayer):
            old = getattr(stored, field.name)
            if isinstance(old, StoredMatrix):
                parts[field.name] = self._linear(old, "layers")
            else:
                parts[field.name] = None if old is None else to_mlx(old)
        return MlxLayer(**parts)

    def _linear(self, stored: StoredMatrix, place: str) -> Linear:
        self._held.get(place, []).extend(map(self._forms.of, stored.parts))
        matrix = stacked([self._forms.matrix(part) for part in stored.parts])
        mx.eval(*_arrays_of(matrix))  # so that no matrix waits in two forms
        return Linear(matrix, None if stored.bias is None else to_mlx(stored.bias))

    def _described(self, what: str) -> str:
        """Named as the CPU's decoder names them."""
        parts = []
        for place, forms in self._held.items():
            names = dict.fromkeys(getattr(form, what) for form in forms)
            parts.append(f"{' and '.join(names)} ({place})")
        return ", ".join(parts)


def _arrays_of(matrix: Matrix) -> list[mx.array]:
    parts = getattr(matrix, "parts", None)
    if parts is not None:
        return [array for part in parts for array in _arrays_of(part)]
    return [value for value in vars(matrix).values() if isinstance(value, mx.array)]

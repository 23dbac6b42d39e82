"""From a checkpoint to a decoder on the CPU: puts every matrix into its format."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeGuard

import torch
from torch import Tensor

from kakeya.kernels import Kernels, PackedPart
from kakeya.models.blocks import BlockTensor
from kakeya.models.checkpoint import Checkpoint
from kakeya.models.decoder import Decoder
from kakeya.models.embedding import Embedding, block_rows, dense_rows
from kakeya.models.float_types import FLOAT_NAMES, FLOAT_TYPES
from kakeya.models.fused import fused_layers
from kakeya.models.layer import Layer
from kakeya.models.linear import Linear, PackedLinear, StackedLinear, dense_linear, quantized_linear
from kakeya.models.packed import packed_parts
from kakeya.models.quantized import (
    GROUP,
    INTEGER_BITS,
    Bits,
    QuantizedTensor,
    concatenate,
    integers_of,
    quantize,
)
from kakeya.models.row_ops import TorchRowOps
from kakeya.models.tensors import ModelTensors, Stored, StoredMatrix, as_float
from kakeya.types import DType, Numerics, WeightFormat

_ASKED_BITS: dict[WeightFormat, Bits] = {WeightFormat.INT4: 4, WeightFormat.INT8: 8}
_AS_STORED = (WeightFormat.AUTO, WeightFormat.NATIVE)
_TABLE, _HEAD = "embedding", "head"


def load_decoder(
    checkpoint: Checkpoint,
    *,
    dtype: DType,
    weights: WeightFormat,
    numerics: Numerics,
    kernels: Kernels | None,
) -> Decoder:
    """The decoder that `checkpoint` describes, ready to run.

    `weights`: native and auto keep quantized tensors as the file has them where there are kernels for them
    (torch has some for 4 bits), and hold the others in `dtype`; float32 and bf16 round all of them to that;
    int8 and int4 quantize what is finer. A matrix whose columns do not make whole groups of 32 stays in
    `dtype`.
    Raises CorruptCheckpoint for a missing tensor, a wrong shape or weights that are not finite.
    """
    return _Loader(checkpoint, FLOAT_TYPES[dtype], weights, numerics is Numerics.EXACT, kernels).decoder()


class _Loader:
    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        weights: WeightFormat,
        exact: bool,
        kernels: Kernels | None,
    ) -> None:
        self._checkpoint = checkpoint
        self._config = checkpoint.config
        self._tensors = ModelTensors(checkpoint)
        self._weights = weights
        # Float weights are rounded to one type and held in another where matmuls need it.
        self._held = torch.float32 if weights is WeightFormat.FLOAT32 else dtype
        self._rounded = torch.bfloat16 if weights is WeightFormat.BF16 else self._held
        self._exact = exact
        self._kernels = kernels
        self._packed: dict[str, PackedPart] = {}

    def decoder(self) -> Decoder:
        table = self._tensors.embedding()
        layers = [self._tensors.layer(index) for index in range(self._config.num_layers)]
        head = self._tensors.untied_head()
        self._pack({_TABLE: table} | ({} if head is None else {_HEAD: head}) | _matrices(layers))
        dense = None if self._keeps_blocks(table.parts[0]) else self._floats(table.parts)
        loaded = [self._layer(index, layer) for index, layer in enumerate(layers)]
        decoder = Decoder(
            self._config,
            self._kernels or TorchRowOps(self._exact),
            partial(dense_rows, dense) if dense is not None else self._embedding(table),
            loaded,
            self._tensors.final_norm(),
            self._tied_head(table, dense) if head is None else self._linear(_HEAD, head),
            self._tensors.num_parameters,
            None if self._kernels is None else fused_layers(self._kernels, self._config, loaded),
        )
        self._checkpoint.release()
        return decoder

    def _pack(self, matrices: Mapping[str, StoredMatrix]) -> None:
        if self._kernels is None:
            return
        kept = {
            _part_name(name, index): part
            for name, matrix in matrices.items()
            for index, part in enumerate(matrix.parts)
            if self._keeps_blocks(part)
        }
        self._packed = packed_parts(self._kernels, self._checkpoint.files, kept)

    def _keeps_blocks(self, stored: Stored) -> TypeGuard[BlockTensor]:
        """Whether the file's own numbers are used, as it has them."""
        return self._weights in _AS_STORED and isinstance(stored, BlockTensor)

    def _embedding(self, table: StoredMatrix) -> Embedding:
        (stored,) = table.parts
        assert isinstance(stored, BlockTensor)
        if self._kernels is not None:
            packed = self._packed[_part_name(_TABLE, 0)]
            return partial(self._kernels.dequantize_rows, packed, table.shape[1])
        if not self._config.tied_head:  # as a head it is checked when it is expanded
            stored.check()
        return partial(block_rows, stored)

    def _layer(self, index: int, stored: Layer[StoredMatrix]) -> Layer[Linear]:
        return stored.map(lambda name, matrix: self._linear(f"{index}.{name}", matrix))

    def _tied_head(self, table: StoredMatrix, dense: Tensor | None) -> Linear:
        """The head that multiplies by the embedding's table, in the same memory where both can read it."""
        if dense is not None and self._bits(table.parts) is None:
            return self._dense(dense, None)
        return self._linear(_TABLE, table)

    def _linear(self, name: str, matrix: StoredMatrix) -> Linear:
        return self._linear_of([_part_name(name, index) for index in range(len(matrix.parts))], matrix)

    def _linear_of(self, names: Sequence[str], matrix: StoredMatrix) -> Linear:
        """`names`: those of the parts among what was packed."""
        kept = [self._keeps_blocks(part) for part in matrix.parts]
        if self._kernels is None or not any(kept):
            return self._own_linear(matrix)
        if all(kept):
            return self._packed_linear(self._kernels, names, matrix)
        parts = zip(names, matrix.split(), strict=True)
        return StackedLinear([self._linear_of([name], part) for name, part in parts])

    def _packed_linear(self, kernels: Kernels, names: Sequence[str], matrix: StoredMatrix) -> Linear:
        formats = dict.fromkeys(part.format.name for part in matrix.parts if isinstance(part, BlockTensor))
        parts = [self._packed[name] for name in names]
        return PackedLinear(kernels, parts, matrix.shape[1], matrix.bias, tuple(formats))

    def _own_linear(self, matrix: StoredMatrix) -> Linear:
        """In a format of our own: floats, or integers with a scale and a minimum for every 32 columns."""
        bits = self._bits(matrix.parts)
        if bits is None:
            return self._dense(self._floats(matrix.parts), matrix.bias)
        weight = concatenate([as_integers(part, bits) for part in matrix.parts])
        return quantized_linear(
            weight, matrix.bias, dtype=self._held, exact=self._exact, kernels=self._kernels
        )

    def _bits(self, parts: Sequence[Stored]) -> Bits | None:
        """How many bits the parts will be held in; None for floats."""
        if parts[0].shape[1] % GROUP or self._weights in (WeightFormat.BF16, WeightFormat.FLOAT32):
            return None
        if self._weights in _ASKED_BITS:
            return _ASKED_BITS[self._weights]
        kept = [INTEGER_BITS[part.format] for part in parts if _is_integer(part)]
        return max(kept) if len(kept) == len(parts) else None

    def _floats(self, parts: Sequence[Stored]) -> Tensor:
        """The parts stacked, rounded to what was asked for. A lone part may stay a view of the file."""
        floats = [as_float(part, self._rounded).to(self._held) for part in parts]
        return torch.cat(floats) if len(floats) > 1 else floats[0]

    def _dense(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return dense_linear(weight, bias, exact=self._exact, origin=FLOAT_NAMES[self._rounded])


def _matrices(layers: Sequence[Layer[StoredMatrix]]) -> dict[str, StoredMatrix]:
    return {
        f"{index}.{name}": matrix
        for index, layer in enumerate(layers)
        for name, matrix in layer.matrices.items()
    }


def _part_name(matrix: str, index: int) -> str:
    return f"{matrix}.{index}"


def _is_integer(stored: Stored) -> TypeGuard[BlockTensor]:
    """Whether it can be held as integers without changing a number."""
    return isinstance(stored, BlockTensor) and stored.format in INTEGER_BITS


def as_integers(stored: Stored, bits: Bits) -> QuantizedTensor:
    """Integers are kept where they fit; finer numbers are quantized."""
    if _is_integer(stored) and INTEGER_BITS[stored.format] <= bits:
        stored.check()
        return integers_of(stored).widened(bits)
    return quantize(as_float(stored, torch.float32), bits)

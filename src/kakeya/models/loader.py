"""From a checkpoint to a decoder on the CPU: puts every matrix into its format."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kakeya.kernels import Kernels
from kakeya.models.checkpoint import Checkpoint
from kakeya.models.decoder import Decoder, Layer
from kakeya.models.linear import FLOAT_NAMES, FLOAT_TYPES, Linear, dense_linear, quantized_linear
from kakeya.models.quantized import GROUP, Bits, QuantizedTensor, concatenate, quantize
from kakeya.models.row_ops import TorchRowOps
from kakeya.models.tensors import ModelTensors, Stored, StoredLayer, StoredMatrix, as_float
from kakeya.types import DType, Numerics, WeightFormat

_ASKED_BITS: dict[WeightFormat, Bits] = {WeightFormat.INT4: 4, WeightFormat.INT8: 8}


def load_decoder(
    checkpoint: Checkpoint,
    *,
    dtype: DType,
    weights: WeightFormat,
    numerics: Numerics,
    kernels: Kernels | None,
) -> Decoder:
    """The decoder that `checkpoint` describes, ready to run.

    `weights`: native and auto keep 4- and 8-bit tensors as the file has them and hold the others in `dtype`;
    float32 and bf16 round all of them to that; int8 and int4 quantize what is finer. A matrix whose columns
    do not make whole groups of 32 stays in `dtype`.
    Raises CorruptCheckpoint for a missing tensor or a wrong shape.
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
        self._config = checkpoint.config
        self._tensors = ModelTensors(checkpoint)
        self._weights = weights
        # Float weights are rounded to one type and held in another where products need it.
        self._held = torch.float32 if weights is WeightFormat.FLOAT32 else dtype
        self._rounded = torch.bfloat16 if weights is WeightFormat.BF16 else self._held
        self._exact = exact
        self._kernels = kernels

    def decoder(self) -> Decoder:
        stored = self._tensors.embedding()
        embedding = self._floats(stored.parts)
        layers = [self._layer(self._tensors.layer(index)) for index in range(self._config.num_layers)]
        final_norm = self._tensors.final_norm()
        head = self._head(stored, embedding)
        ops = self._kernels or TorchRowOps(self._exact)
        return Decoder(self._config, ops, embedding, layers, final_norm, head, self._tensors.num_parameters)

    def _layer(self, stored: StoredLayer) -> Layer:
        return Layer(
            input_norm=stored.input_norm,
            qkv=self._linear(stored.qkv),
            query_norm=stored.query_norm,
            key_norm=stored.key_norm,
            output=self._linear(stored.output),
            post_attention_norm=stored.post_attention_norm,
            mlp_norm=stored.mlp_norm,
            gate_up=self._linear(stored.gate_up),
            down=self._linear(stored.down),
            post_mlp_norm=stored.post_mlp_norm,
            scalar=stored.scalar,
        )

    def _head(self, stored_embedding: StoredMatrix, embedding: Tensor) -> Linear:
        head = self._tensors.untied_head()
        if head is not None:
            return self._linear(head)
        if self._bits(stored_embedding.parts) is None:
            return self._dense(embedding, None)  # one table for both uses
        return self._linear(stored_embedding)

    def _linear(self, matrix: StoredMatrix) -> Linear:
        bits = self._bits(matrix.parts)
        if bits is None:
            return self._dense(self._floats(matrix.parts), matrix.bias)
        weight = concatenate([_as_integers(part, bits) for part in matrix.parts])
        return quantized_linear(
            weight, matrix.bias, dtype=self._held, exact=self._exact, kernels=self._kernels
        )

    def _bits(self, parts: Sequence[Stored]) -> Bits | None:
        """How many bits the parts will be held in; None for floats."""
        if parts[0].shape[1] % GROUP or self._weights in (WeightFormat.BF16, WeightFormat.FLOAT32):
            return None
        if self._weights in _ASKED_BITS:
            return _ASKED_BITS[self._weights]
        stored = [part.bits for part in parts if isinstance(part, QuantizedTensor)]
        return max(stored) if len(stored) == len(parts) else None

    def _floats(self, parts: Sequence[Stored]) -> Tensor:
        """The parts stacked, rounded to what was asked for. A lone part may stay a view of the file."""
        floats = [as_float(part, self._rounded).to(self._held) for part in parts]
        return torch.cat(floats) if len(floats) > 1 else floats[0]

    def _dense(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return dense_linear(weight, bias, exact=self._exact, origin=FLOAT_NAMES[self._rounded])


def _as_integers(stored: Stored, bits: Bits) -> QuantizedTensor:
    """Integers are kept where they fit; finer numbers are quantized."""
    if isinstance(stored, QuantizedTensor) and stored.bits <= bits:
        return stored.widened(bits)
    return quantize(as_float(stored, torch.float32), bits)

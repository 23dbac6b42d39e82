"""From a checkpoint to a decoder: checks every shape and puts every matrix into its format."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kakeya.errors import CorruptCheckpoint
from kakeya.kernels import Kernels
from kakeya.models.checkpoint import Checkpoint
from kakeya.models.decoder import Decoder, Layer
from kakeya.models.linear import FLOAT_NAMES, Linear, dense_linear, quantized_linear
from kakeya.models.quantized import GROUP, Bits, QuantizedTensor, concatenate, quantize
from kakeya.models.row_ops import TorchRowOps
from kakeya.types import DType, Numerics, WeightFormat

Stored = Tensor | QuantizedTensor

_TORCH_TYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}
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
    return _Loader(checkpoint, _TORCH_TYPES[dtype], weights, numerics is Numerics.EXACT, kernels).decoder()


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
        self._weights = weights
        # Float weights are rounded to one type and held in another where products need it.
        self._held = torch.float32 if weights is WeightFormat.FLOAT32 else dtype
        self._rounded = torch.bfloat16 if weights is WeightFormat.BF16 else self._held
        self._exact = exact
        self._kernels = kernels
        self._num_parameters = 0

    def decoder(self) -> Decoder:
        config = self._config
        stored = self._fetch("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        embedding = self._floats([stored])
        layers = [self._layer(f"model.layers.{index}.") for index in range(config.num_layers)]
        final_norm = self._norm("model.norm.weight", config.hidden_size)
        head = self._head(stored, embedding)
        ops = self._kernels or TorchRowOps(self._exact)
        return Decoder(config, ops, embedding, layers, final_norm, head, self._num_parameters)

    def _layer(self, prefix: str) -> Layer:
        config = self._config
        hidden, inner = config.hidden_size, config.intermediate_size
        # Gemma's names: a norm before and after each block. Others: post_attention_layernorm is the MLP's.
        mlp_norm = "pre_feedforward_layernorm" if config.post_norms else "post_attention_layernorm"
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        qkv = {"q_proj": config.query_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        return Layer(
            input_norm=self._norm(f"{prefix}input_layernorm.weight", hidden),
            qkv=self._matrix(attention, qkv, hidden, config.attention_bias),
            query_norm=self._optional_norm(config.qk_norm, f"{attention}q_norm.weight", config.head_dim),
            key_norm=self._optional_norm(config.qk_norm, f"{attention}k_norm.weight", config.head_dim),
            output=self._matrix(attention, {"o_proj": hidden}, config.query_size, config.output_bias),
            post_attention_norm=self._optional_norm(
                config.post_norms, f"{prefix}post_attention_layernorm.weight", hidden
            ),
            mlp_norm=self._norm(f"{prefix}{mlp_norm}.weight", hidden),
            gate_up=self._matrix(mlp, {"gate_proj": inner, "up_proj": inner}, hidden, config.mlp_bias),
            down=self._matrix(mlp, {"down_proj": hidden}, inner, config.mlp_bias),
            post_mlp_norm=self._optional_norm(
                config.post_norms, f"{prefix}post_feedforward_layernorm.weight", hidden
            ),
        )

    def _head(self, stored_embedding: Stored, embedding: Tensor) -> Linear:
        if not self._config.tied_head:
            head = self._fetch("lm_head.weight", self._config.vocab_size, self._config.hidden_size)
            return self._linear([head], None)
        if self._bits([stored_embedding]) is None:
            return self._dense(embedding, None)  # one table for both uses
        return self._linear([stored_embedding], None)

    def _matrix(self, prefix: str, outputs: dict[str, int], columns: int, with_bias: bool) -> Linear:
        """The named projections, stacked in order into one product."""
        parts = [self._fetch(f"{prefix}{name}.weight", rows, columns) for name, rows in outputs.items()]
        bias = None
        if with_bias:
            bias = torch.cat([self._vector(f"{prefix}{name}.bias", rows) for name, rows in outputs.items()])
        return self._linear(parts, bias)

    def _linear(self, parts: Sequence[Stored], bias: Tensor | None) -> Linear:
        bits = self._bits(parts)
        if bits is None:
            return self._dense(self._floats(parts), bias)
        weight = concatenate([_as_integers(part, bits) for part in parts])
        return quantized_linear(weight, bias, dtype=self._held, exact=self._exact, kernels=self._kernels)

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
        floats = [_as_float(part, self._rounded).to(self._held) for part in parts]
        return torch.cat(floats) if len(floats) > 1 else floats[0]

    def _dense(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return dense_linear(weight, bias, exact=self._exact, origin=FLOAT_NAMES[self._rounded])

    def _optional_norm(self, present: bool, name: str, size: int) -> Tensor | None:
        return self._norm(name, size) if present else None

    def _norm(self, name: str, size: int) -> Tensor:
        return self._vector(name, size) + self._config.norm_offset

    def _vector(self, name: str, size: int) -> Tensor:
        return _as_float(self._fetch(name, size), torch.float32)

    def _fetch(self, name: str, *shape: int) -> Stored:
        stored = self._checkpoint.tensor(name)
        if tuple(stored.shape) != shape:
            raise CorruptCheckpoint(
                f"tensor {name} has shape {tuple(stored.shape)}, the configuration needs {shape}"
            )
        self._num_parameters += stored.shape.numel() if isinstance(stored, Tensor) else stored.q.numel()
        return stored


def _as_float(stored: Stored, dtype: torch.dtype) -> Tensor:
    return stored.dequantize(dtype) if isinstance(stored, QuantizedTensor) else stored.to(dtype)


def _as_integers(stored: Stored, bits: Bits) -> QuantizedTensor:
    """Integers are kept where they fit; finer numbers are quantized."""
    if isinstance(stored, QuantizedTensor) and stored.bits <= bits:
        return stored.widened(bits)
    return quantize(_as_float(stored, torch.float32), bits)

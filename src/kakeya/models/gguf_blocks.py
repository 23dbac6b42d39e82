"""GGUF tensor bytes to tensors: 4- and 8-bit blocks kept as they are, other quantized types expanded."""

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from torch import Tensor

from kakeya.errors import CorruptCheckpoint, UnsupportedModel
from kakeya.models.gguf_file import GgufTensor
from kakeya.models.quantized import GROUP, QuantizedTensor

_FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}


def decode(tensor: GgufTensor, raw: Tensor) -> Tensor | QuantizedTensor:
    """`raw` is uint8 [rows, row_bytes], possibly reordered by rows.

    Raises UnsupportedModel for a type that nothing here can expand.
    """
    if tensor.kind in _FLOATS:
        return raw.view(_FLOATS[tensor.kind]).view(tensor.shape)
    if tensor.kind in (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0) and len(tensor.shape) == 2:
        return _checked(tensor, _grouped(tensor.kind, raw))
    try:
        expanded = dequantize(raw.numpy(), tensor.kind)
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"tensor {tensor.name} has type {tensor.kind.name}, which is not supported"
        ) from error
    return torch.from_numpy(np.ascontiguousarray(expanded, dtype=np.float32)).view(tensor.shape)


def _grouped(kind: Kind, raw: Tensor) -> QuantizedTensor:
    """The block formats that are groups of 32 with a float16 scale; blocks [rows, groups, bytes]."""
    blocks = raw.view(raw.shape[0], -1, {Kind.Q4_0: 18, Kind.Q4_1: 20, Kind.Q8_0: 34}[kind])
    scale = _halves(blocks, 0)
    if kind == Kind.Q8_0:  # w = signed * scale
        # Flipping the top bit adds 128 to a signed byte.
        q = blocks[..., 2:].bitwise_xor(0x80).view(raw.shape[0], -1)
        return QuantizedTensor(8, q, scale, scale * -128)
    if kind == Kind.Q4_0:  # w = (q - 8) * scale
        return QuantizedTensor(4, _nibbles(blocks[..., 2:]), scale, scale * -8)
    return QuantizedTensor(4, _nibbles(blocks[..., 4:]), scale, _halves(blocks, 2))


def _halves(blocks: Tensor, offset: int) -> Tensor:
    """The float16 at `offset` of every block, [rows, groups]."""
    return blocks[..., offset : offset + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """Low halves are columns 0-15 of a group, high halves columns 16-31; [rows, groups, 16] -> [rows, K]."""
    rows, groups, half = packed.shape
    q = torch.empty(rows, groups, GROUP, dtype=torch.uint8)
    torch.bitwise_and(packed, 0x0F, out=q[..., :half])
    torch.bitwise_right_shift(packed, 4, out=q[..., half:])
    return q.view(rows, groups * GROUP)


def _checked(tensor: GgufTensor, quantized: QuantizedTensor) -> QuantizedTensor:
    # One sum finds a stray NaN or infinity in either.
    if not torch.isfinite(quantized.scale.float().sum() + quantized.minimum.float().sum()):
        raise CorruptCheckpoint(f"tensor {tensor.name} holds scales that are not finite numbers")
    return quantized

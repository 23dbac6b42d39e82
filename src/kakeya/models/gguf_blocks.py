"""GGUF tensor bytes to tensors: matrices in block formats kept as they are, the rest expanded to floats."""

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from torch import Tensor

from kakeya.errors import UnsupportedModel
from kakeya.models.blocks import BlockFormat, BlockTensor
from kakeya.models.gguf_file import GgufTensor

_FLOATS = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}


def decode(tensor: GgufTensor, raw: Tensor) -> Tensor | BlockTensor:
    """`raw` is uint8 [rows, row_bytes], possibly reordered by rows.

    The caller checks a matrix of blocks; it is not read here. Raises UnsupportedModel for a type that cannot
    be expanded, CorruptCheckpoint for a vector that is not finite.
    """
    if tensor.kind in _FLOATS:
        return raw.view(_FLOATS[tensor.kind]).view(tensor.shape)
    form = BlockFormat.__members__.get(tensor.kind.name)
    if form is None:
        return _expanded(tensor, raw)
    blocks = BlockTensor(form, raw, tensor.name)
    if len(tensor.shape) == 2:
        return blocks
    blocks.check()
    return blocks.dequantize().view(tensor.shape)


def _expanded(tensor: GgufTensor, raw: Tensor) -> Tensor:
    """A format for which there are no kernels here, as float32."""
    try:
        expanded = dequantize(raw.numpy(), tensor.kind)
    except NotImplementedError as error:
        raise UnsupportedModel(
            f"tensor {tensor.name} has type {tensor.kind.name}, which is not supported"
        ) from error
    return torch.from_numpy(np.ascontiguousarray(expanded, dtype=np.float32)).view(tensor.shape)

"""The table of token embeddings: dense, or in a file's own blocks, expanded row by row as they are read."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kakeya.kernels import Kernels
from kakeya.models.blocks import BlockTensor


class Embedding(Protocol):
    """Token ids, int64 [n], to rows."""

    def __call__(self, token_ids: Tensor) -> Tensor:
        """New float32 rows [n, hidden]."""
        ...


class DenseEmbedding:
    """A table in some float type."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __call__(self, token_ids: Tensor) -> Tensor:
        return functional.embedding(token_ids, self.table).float()


class BlockEmbedding:
    """Rows of quantized blocks, which stay in the file."""

    def __init__(self, table: BlockTensor, kernels: Kernels | None) -> None:
        self._table = table
        self._kernels = kernels

    def __call__(self, token_ids: Tensor) -> Tensor:
        table = self._table
        if self._kernels is None:
            return BlockTensor(table.format, table.raw[token_ids]).dequantize(torch.float32)
        return self._kernels.dequantize_rows(table.format.name, table.raw, table.shape[1], token_ids)

"""The table of token embeddings: dense, or in a file's own numbers, dequantized as rows are read."""

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kakeya.kernels import Kernels, PackedPart
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

    def __init__(self, table: BlockTensor) -> None:
        self._table = table

    def __call__(self, token_ids: Tensor) -> Tensor:
        return BlockTensor(self._table.format, self._table.raw[token_ids]).dequantize(torch.float32)


class PackedEmbedding:
    """Rows of weights packed for the kernels. A head that shares the table reads the same memory."""

    def __init__(self, kernels: Kernels, table: PackedPart, hidden: int) -> None:
        self._kernels = kernels
        self._table = table
        self._hidden = hidden

    def __call__(self, token_ids: Tensor) -> Tensor:
        return self._kernels.dequantize_rows(self._table, self._hidden, token_ids)

"""Rows of the table of token embeddings: dense, or in a file's own numbers, dequantized as they are read."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kakeya.models.blocks import BlockTensor

# Token ids, int64 [n], to new float32 rows [n, hidden]. Weights packed for the kernels have one of their own:
# `Kernels.dequantize_rows`.
Embedding = Callable[[Tensor], Tensor]


def dense_rows(table: Tensor, token_ids: Tensor) -> Tensor:
    return functional.embedding(token_ids, table).float()


def block_rows(table: BlockTensor, token_ids: Tensor) -> Tensor:
    return BlockTensor(table.format, table.raw[token_ids]).dequantize(torch.float32)

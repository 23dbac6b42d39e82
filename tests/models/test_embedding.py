"""Tables of embeddings: rows out of a file's blocks have the bits of the whole table expanded."""

from functools import partial

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from kakeya import kernels as native
from kakeya.models.blocks import BlockFormat, BlockTensor
from kakeya.models.embedding import Embedding, block_rows, dense_rows
from kakeya.types import KernelChoice
from support import gguf_files

IDS = torch.tensor([3, 0, 16, 3])


def _embedding(table: BlockTensor, choice: KernelChoice) -> Embedding:
    kernels = native.load(choice)
    if kernels is None:
        return partial(block_rows, table)
    return partial(kernels.dequantize_rows, kernels.pack_blocks(table.format.name, table.raw, 512), 512)


@pytest.mark.parametrize("choice", [KernelChoice.TORCH, KernelChoice.NATIVE])
@pytest.mark.parametrize("kind", gguf_files.BLOCK_KINDS, ids=lambda kind: kind.name)
def test_rows_of_blocks(kind: Kind, choice: KernelChoice) -> None:
    raw = torch.from_numpy(gguf_files.random_blocks(kind, 17, 512))
    table = BlockTensor(BlockFormat[kind.name], raw)
    rows = _embedding(table, choice)(IDS)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, table.dequantize()[IDS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_floats_are_copies(dtype: torch.dtype) -> None:
    table = torch.randn(17, 8).to(dtype)
    kept = table.clone()
    rows = dense_rows(table, IDS)
    assert rows.dtype == torch.float32
    assert torch.equal(rows, kept[IDS].float())
    rows.zero_()
    assert torch.equal(table, kept)

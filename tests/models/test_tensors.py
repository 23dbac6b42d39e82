"""Stacks of projections, taken apart again."""

import torch
from gguf import GGMLQuantizationType as Kind

from kakeya.models.blocks import BlockFormat, BlockTensor
from kakeya.models.tensors import StoredMatrix
from support import gguf_files

BLOCKS = BlockTensor(BlockFormat.Q4_K, torch.from_numpy(gguf_files.random_blocks(Kind.Q4_K, 3, 256)))
FLOATS = torch.randn(2, 256)


def test_each_part_takes_its_own_bias_along() -> None:
    matrix = StoredMatrix((BLOCKS, FLOATS), torch.arange(5.0))
    assert matrix.shape == (5, 256)
    first, second = matrix.split()
    assert (first.parts, second.parts) == ((BLOCKS,), (FLOATS,))
    assert first.bias is not None
    assert second.bias is not None
    assert (first.bias.tolist(), second.bias.tolist()) == ([0, 1, 2], [3, 4])


def test_parts_of_a_matrix_without_bias_have_none() -> None:
    parts = StoredMatrix((BLOCKS, FLOATS)).split()
    assert [part.bias for part in parts] == [None, None]
    assert [part.shape for part in parts] == [(3, 256), (2, 256)]

"""Matrices in MLX's forms hold the file's numbers."""

import mlx.core as mx
import numpy as np
import pytest
import torch

from kakeya.engine.mlx.arrays import to_torch
from kakeya.engine.mlx.matmul import (
    GROUPS_OF_32,
    AffineMatrix,
    DenseMatrix,
    Linear,
    StackedMatrix,
    affine_of_blocks,
    affine_of_integers,
    stacked,
)
from kakeya.models.blocks import BlockFormat, BlockTensor
from kakeya.models.quantized import quantize
from support.gguf_files import Kind, random_blocks

COLUMNS = 512


def blocks_of(form: BlockFormat, rows: int = 6, seed: int = 0) -> BlockTensor:
    raw = random_blocks(Kind[form.name], rows, COLUMNS, seed)
    return BlockTensor(form, torch.from_numpy(raw).reshape(rows, -1))


def read(matrix: AffineMatrix | DenseMatrix, rows: int) -> torch.Tensor:
    array = matrix.rows(mx.array(np.arange(rows)))
    mx.eval(array)
    return to_torch(array).clone()


def inputs(rows: int = 3, columns: int = COLUMNS) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(5))


def close(computed: mx.array, expected: torch.Tensor) -> bool:
    mx.eval(computed)
    scale = expected.abs().max().item()
    return torch.allclose(to_torch(computed), expected, rtol=1e-5, atol=1e-5 * scale)


@pytest.mark.parametrize("form", GROUPS_OF_32)
def test_blocks_of_every_format_with_groups_of_32_keep_their_numbers(form: BlockFormat) -> None:
    blocks = blocks_of(form)
    expected = blocks.dequantize()
    matrix = affine_of_blocks(blocks)
    assert (read(matrix, 6) - expected).abs().max() <= 1e-6 * expected.abs().max()
    assert close(matrix.multiply(mx.array(inputs().numpy())), inputs() @ expected.T)


def test_formats_with_smaller_groups_are_not_claimed() -> None:
    """MLX has no groups of 16."""
    assert set(BlockFormat) - set(GROUPS_OF_32) == {BlockFormat.Q2_K, BlockFormat.Q3_K, BlockFormat.Q6_K}


@pytest.mark.parametrize("bits", [4, 8])
def test_our_own_integers_are_the_same_numbers(bits: int) -> None:
    weight = quantize(inputs(7), bits)
    assert torch.allclose(read(affine_of_integers(weight), 7), weight.dequantize(), rtol=1e-6, atol=1e-6)


def test_parts_are_stacked_in_one_call_where_they_are_alike() -> None:
    first, second = (
        affine_of_blocks(blocks_of(BlockFormat.Q4_0)),
        affine_of_blocks(blocks_of(BlockFormat.Q4_K)),
    )
    other = affine_of_blocks(blocks_of(BlockFormat.Q8_0))
    dense = DenseMatrix(mx.array(inputs(4).numpy()))
    x = mx.array(inputs(2).numpy())
    assert stacked([first]) is first
    for parts, kind in (
        ([first, second], AffineMatrix),
        ([dense, dense], DenseMatrix),
        ([first, other], StackedMatrix),
        ([first, dense], StackedMatrix),
        ([dense, first], StackedMatrix),
    ):
        whole = stacked(parts)
        assert isinstance(whole, kind)
        apart = mx.concatenate([part.multiply(x) for part in parts], axis=-1)
        mx.eval(apart)
        assert close(whole.multiply(x), to_torch(apart))


def test_a_bias_is_added() -> None:
    dense = DenseMatrix(mx.array(inputs(4).numpy()))
    x, bias = inputs(2), torch.arange(4.0)
    assert close(Linear(dense, mx.array(bias.numpy()))(mx.array(x.numpy())), x @ inputs(4).T + bias)


def test_a_stack_of_different_parts_is_no_table() -> None:
    parts = [affine_of_blocks(blocks_of(BlockFormat.Q4_0)), affine_of_blocks(blocks_of(BlockFormat.Q8_0))]
    with pytest.raises(AssertionError, match="one part"):
        stacked(parts).rows(mx.array([0]))

"""GGML's block formats: their table, their weights bit for bit, and scales that are not numbers."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from kakeya.models.blocks import BlockFormat, BlockTensor
from support import gguf_files

SHAPES = [(1, 256), (7, 1536), (900, 1024)]  # the last in several slices


def random_tensor(form: BlockFormat, rows: int = 5, columns: int = 512) -> BlockTensor:
    return BlockTensor(form, torch.from_numpy(gguf_files.random_blocks(Kind[form.name], rows, columns)))


def expected(tensor: BlockTensor) -> torch.Tensor:
    return torch.from_numpy(gguf.dequantize(tensor.raw.numpy(), Kind[tensor.format.name]))


@pytest.mark.parametrize("form", BlockFormat)
def test_the_table_is_ggmls(form: BlockFormat) -> None:
    kind = Kind(form.ggml_type)
    assert kind.name == form.name
    assert gguf.GGML_QUANT_SIZES[kind] == (form.columns, form.nbytes)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", BlockFormat)
def test_weights_have_the_gguf_packages_bits(form: BlockFormat, shape: tuple[int, int]) -> None:
    tensor = random_tensor(form, *shape)
    assert tensor.shape == shape
    assert tensor.nbytes == tensor.raw.numel()
    assert torch.equal(tensor.dequantize().view(torch.int32), expected(tensor).view(torch.int32))


@pytest.mark.parametrize("form", BlockFormat)
def test_weights_are_rounded_once(form: BlockFormat) -> None:
    tensor = random_tensor(form)
    assert torch.equal(tensor.dequantize(torch.bfloat16), expected(tensor).bfloat16())


def test_every_exponent_of_mxfp4() -> None:
    raw = torch.randint(0, 256, (256, 17), dtype=torch.uint8)
    raw[:, 0] = torch.arange(256)
    tensor = BlockTensor(BlockFormat.MXFP4, raw[:253])
    assert torch.equal(tensor.dequantize(), expected(tensor))
    assert tensor.has_finite_scales()
    assert not BlockTensor(BlockFormat.MXFP4, raw[:254]).has_finite_scales()


@pytest.mark.parametrize("form", BlockFormat)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_scales_that_are_not_numbers(form: BlockFormat, value: float) -> None:
    for offset in gguf_files.SCALE_OFFSETS[Kind[form.name]]:
        tensor = random_tensor(form)
        assert tensor.has_finite_scales()
        start = tensor.raw.shape[1] - form.nbytes + offset  # in the last block of a row
        tensor.raw[2, start : start + 2] = torch.tensor([value]).half().view(torch.uint8)
        assert not tensor.has_finite_scales()


def test_rows_are_a_view() -> None:
    tensor = random_tensor(BlockFormat.Q5_K)
    some = tensor[1:3]
    assert some.raw.data_ptr() == tensor.raw[1].data_ptr()
    assert torch.equal(some.dequantize(), tensor.dequantize()[1:3])


def test_moving_to_a_device() -> None:
    moved = random_tensor(BlockFormat.Q3_K).to(torch.device("meta"))
    assert moved.raw.is_meta
    assert moved.shape == (5, 512)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", BlockFormat)
def test_a_device_computes_the_same_bits(form: BlockFormat) -> None:
    tensor = random_tensor(form, 9000, 2048)  # in several slices
    found = tensor.to(torch.device("cuda")).dequantize()
    assert found.is_cuda
    assert torch.equal(found.cpu().view(torch.int32), tensor.dequantize().view(torch.int32))

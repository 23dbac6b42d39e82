"""Groups of 32: expanding, quantizing, stacking."""

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings, strategies as st

from kakeya.errors import UnsupportedModel
from kakeya.models.blocks import BlockFormat, BlockTensor
from kakeya.models.quantized import INTEGER_BITS, QuantizedTensor, concatenate, integers_of, quantize
from support import gguf_files


def random_quantized(bits: int, rows: int = 6, columns: int = 96) -> QuantizedTensor:
    generator = torch.Generator().manual_seed(bits + rows)
    return QuantizedTensor(
        bits,
        torch.randint(0, 2**bits, (rows, columns), dtype=torch.uint8, generator=generator),
        torch.rand(rows, columns // 32, generator=generator).half(),
        torch.randn(rows, columns // 32, generator=generator).half(),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantize_is_scale_times_level_plus_minimum(dtype: torch.dtype) -> None:
    weight = random_quantized(4)
    scale, minimum = (part.float().repeat_interleave(32, dim=1) for part in (weight.scale, weight.minimum))
    assert torch.equal(weight.dequantize(dtype), (weight.q.float() * scale + minimum).to(dtype))


def test_dequantize_in_several_slices() -> None:
    weight = random_quantized(8, rows=70, columns=32 * 1024)
    whole = weight.dequantize()
    for row in (0, 31, 32, 69):
        part = QuantizedTensor(
            8, weight.q[row : row + 1], weight.scale[row : row + 1], weight.minimum[row : row + 1]
        )
        assert torch.equal(whole[row], part.dequantize()[0])


@settings(max_examples=40)
@given(st.sampled_from([4, 8]), st.integers(0, 2**31), st.floats(1e-3, 1e2), st.floats(-3, 3))
def test_quantize_is_within_half_a_step(bits: int, seed: int, spread: float, shift: float) -> None:
    tensor = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed)) * spread + shift
    weight = quantize(tensor, bits)
    assert int(weight.q.max()) < 2**bits
    groups = tensor.view(5, 2, 32)
    step = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    # Half a step, plus what rounding scale and minimum to float16 may move the levels by. The
    # smallest float16 numbers are 2**-24 apart.
    scale_error, minimum_error = ((each * 2**-11).clamp(min=2**-25) for each in (step, groups.abs().amax(-1)))
    allowed = 0.5 * step + 2**bits * scale_error + minimum_error
    error = (weight.dequantize() - tensor).abs().view(5, 2, 32).amax(-1)
    assert torch.all(error <= allowed * 1.01)


def test_quantize_in_several_slices() -> None:
    tensor = torch.randn(70, 32 * 1024)
    whole = quantize(tensor, 4)
    part = quantize(tensor[40:41], 4)
    assert torch.equal(whole.q[40], part.q[0])
    assert torch.equal(whole.scale[40], part.scale[0])


def test_quantize_constant_groups() -> None:
    weight = quantize(torch.full((2, 32), 0.75), 4)
    assert torch.equal(weight.dequantize(), torch.full((2, 32), 0.75))


def test_quantize_keeps_what_already_is_on_levels() -> None:
    """Every group uses its lowest and highest level, so the same levels come out again."""
    weight = random_quantized(4)
    weight.q[:, ::32], weight.q[:, 1::32] = 0, 15
    again = quantize(weight.dequantize(), 4)
    assert torch.equal(again.q, weight.q)
    assert torch.allclose(again.dequantize(), weight.dequantize(), atol=2e-3)


def test_concatenate_takes_the_widest_format() -> None:
    parts = [random_quantized(4, rows=3), random_quantized(8, rows=5), random_quantized(4, rows=1)]
    stacked = concatenate(parts)
    assert stacked.bits == 8
    assert stacked.shape == (9, 96)
    assert torch.equal(stacked.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_widening_changes_no_number() -> None:
    weight = random_quantized(4)
    assert weight.widened(8).bits == 8
    assert torch.equal(weight.widened(8).dequantize(), weight.dequantize())


def random_blocks(form: BlockFormat) -> BlockTensor:
    return BlockTensor(form, torch.from_numpy(gguf_files.random_blocks(Kind[form.name], 7, 512)))


@pytest.mark.parametrize("form", INTEGER_BITS)
def test_blocks_of_integers_keep_their_numbers(form: BlockFormat) -> None:
    blocks = random_blocks(form)
    weight = integers_of(blocks)
    assert weight.bits == INTEGER_BITS[form]
    assert int(weight.q.max()) == 2**weight.bits - 1
    assert weight.shape == blocks.shape
    assert torch.equal(weight.dequantize(), blocks.dequantize())


def test_scales_whose_minimum_is_no_float16() -> None:
    blocks = random_blocks(BlockFormat.Q8_0)
    blocks.raw[3, :2] = torch.tensor([600.0]).half().view(torch.uint8)
    with pytest.raises(UnsupportedModel, match="a scale of 600 times 128 is no float16"):
        integers_of(blocks)

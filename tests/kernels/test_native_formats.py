"""The block formats of model files: packing, products and single rows against what the formats define."""

from types import ModuleType

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize
from torch import Tensor

from kakeya.errors import CorruptCheckpoint
from kakeya.kernels import Kernels, PackedMatrix
from kakeya.kernels.native import BLOCK_BYTES
from support import reference
from support.gguf_files import SCALE_OFFSETS, random_blocks

FORMATS = tuple(BLOCK_BYTES)
SUPER = 256


def blocks_of(name: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Random blocks, and the weights that the `gguf` package reads from them."""
    raw = random_blocks(Kind[name], rows, columns, seed=rows)
    return torch.from_numpy(raw), torch.from_numpy(dequantize(raw, Kind[name]).astype(np.float32))


def matrix_of(kernels: Kernels, name: str, raw: Tensor, columns: int) -> PackedMatrix:
    return kernels.matrix([kernels.pack_blocks(name, raw, columns)], columns)


def expected_product(name: str, x: Tensor, weights: Tensor) -> Tensor:
    group = SUPER if BLOCK_BYTES[name][0] == SUPER else reference.GROUP
    return reference.round_activations(x, group) @ weights.double().T


def close(got: Tensor, expected: Tensor) -> bool:
    return torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "rows, outputs, blocks", [(1, 16, 1), (2, 49, 2), (3, 1, 3), (21, 50, 5), (131, 33, 1)]
)
def test_products(kernels: Kernels, name: str, rows: int, outputs: int, blocks: int) -> None:
    columns = blocks * BLOCK_BYTES[name][0]
    raw, weights = blocks_of(name, outputs, columns)
    x = torch.randn(rows, columns)
    got = kernels.linear(x, matrix_of(kernels, name, raw, columns))
    assert close(got, expected_product(name, x, weights))


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_depend_on_the_others(kernels: Kernels, name: str) -> None:
    raw, _ = blocks_of(name, 40, 1280)
    matrix, x = matrix_of(kernels, name, raw, 1280), torch.randn(37, 1280)
    together = kernels.linear(x, matrix)
    for count in (1, 2, 3, 4, 5, 7, 8, 13):
        for first in (0, 11, 37 - count):
            part = slice(first, first + count)
            assert torch.equal(kernels.linear(x[part], matrix), together[part])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("byte", [0x00, 0xFF])
def test_extreme_codes_and_activations_do_not_overflow(kernels: Kernels, name: str, byte: int) -> None:
    """Every bit of codes and scales set or clear, and every activation as large as it can be."""
    raw = torch.full((16, BLOCK_BYTES[name][1]), byte, dtype=torch.uint8)
    for offset in SCALE_OFFSETS[Kind[name]]:
        raw[:, offset : offset + 2] = torch.tensor([0.5, 0.25]).half().view(torch.uint8)[:2]
    if name == "MXFP4":
        raw[:, 0] = 120
    columns = BLOCK_BYTES[name][0]
    weights = torch.from_numpy(dequantize(raw.numpy(), Kind[name]).astype(np.float32))
    signs = torch.stack([torch.ones(columns), -torch.ones(columns), (-1.0) ** torch.arange(columns)])
    got = kernels.linear(3.0 * signs, matrix_of(kernels, name, raw, columns))
    assert close(got, expected_product(name, 3.0 * signs, weights))


@pytest.mark.parametrize("name", FORMATS)
def test_single_rows_are_what_the_format_defines(best: Kernels, name: str) -> None:
    raw, weights = blocks_of(name, 30, 512)
    part, ids = best.pack_blocks(name, raw, 512), torch.tensor([29, 0, 7, 7, 16, 15])
    assert torch.equal(best.dequantize_rows(part, 512, ids), weights[ids])
    assert torch.equal(best.dequantize_rows(part, 512, torch.arange(30)), weights)
    assert best.dequantize_rows(part, 512, ids[:0]).shape == (0, 512)


def test_parts_of_different_formats_stand_one_below_the_other(kernels: Kernels) -> None:
    names = ("Q4_K", "Q8_0", "Q6_K", "Q4_1")
    stored = [blocks_of(name, rows, 512) for name, rows in zip(names, (40, 17, 3, 64), strict=True)]
    parts = [kernels.pack_blocks(name, raw, 512) for name, (raw, _) in zip(names, stored, strict=True)]
    x, bias, residual = torch.randn(9, 512), torch.randn(124), torch.randn(9, 124)
    got = kernels.linear(x, kernels.matrix(parts, 512), bias, residual)
    alone = [kernels.linear(x, kernels.matrix([part], 512)) for part in parts]
    assert torch.equal(got, residual + (torch.cat(alone, dim=1) + bias))


@pytest.mark.parametrize("name", FORMATS)
def test_fused_instruction_sets_agree_to_the_bit(best: Kernels, native: ModuleType, name: str) -> None:
    raw, _ = blocks_of(name, 50, 512)
    matrix, x = matrix_of(best, name, raw, 512), torch.randn(5, 512)
    results = []
    for isa in ("avx512-vnni", "avx2"):
        try:
            native.set_isa(isa)
        except ValueError:
            pytest.skip(f"this processor cannot run {isa}")
        results.append(best.linear(x, matrix))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", FORMATS)
def test_weights_that_are_not_finite_are_refused(best: Kernels, name: str) -> None:
    raw, _ = blocks_of(name, 20, 512)
    places = [offset + 1 for offset in SCALE_OFFSETS[Kind[name]]] if name != "MXFP4" else [0]
    for place in places:
        broken = raw.clone()
        broken[13, place] = 0xFE if name == "MXFP4" else 0x7C
        with pytest.raises(CorruptCheckpoint, match="scales that are not finite"):
            best.pack_blocks(name, broken, 512)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_take_little_more_than_the_file(best: Kernels, name: str) -> None:
    raw, _ = blocks_of(name, 64, 1024)
    assert best.pack_blocks(name, raw, 1024).nbytes <= 1.1 * raw.numel()


@pytest.mark.parametrize("name", ["Q4_K", "Q5_0"])
def test_a_broken_row_stays_visibly_broken(kernels: Kernels, name: str) -> None:
    raw, _ = blocks_of(name, 16, 256)
    x = torch.zeros(4, 256)
    x[1], x[2, 40], x[3, 40] = 1e-38, float("nan"), float("inf")
    got = kernels.linear(x, matrix_of(kernels, name, raw, 256))
    assert torch.equal(got[0], torch.zeros(16))
    assert got[1].abs().max() < 1e-30
    assert not got[2:].isfinite().any()

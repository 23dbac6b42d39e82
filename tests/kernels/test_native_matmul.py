"""Packed matrices and quantized products against torch."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kakeya.kernels import Kernels, PackedMatrix
from support import reference


def random_weights(bits: int, outputs: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randint(0, 2**bits, (outputs, columns), dtype=torch.uint8)
    scale = (torch.rand(outputs, columns // 32) * 0.02 + 1e-3).half()
    minimum = (torch.randn(outputs, columns // 32) * 0.1).half()
    return q, scale, minimum


def packed(kernels: Kernels, bits: int, outputs: int, columns: int) -> tuple[PackedMatrix, Tensor]:
    weights = random_weights(bits, outputs, columns)
    return affine(kernels, bits, *weights), reference.dequantize(*weights)


def affine(kernels: Kernels, bits: int, q: Tensor, scale: Tensor, minimum: Tensor) -> PackedMatrix:
    return kernels.matrix([kernels.pack(bits, q, scale, minimum)], q.shape[1])


def close(got: Tensor, expected: Tensor) -> bool:
    return torch.allclose(got, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    "rows, outputs, columns",
    [(1, 16, 32), (1, 49, 576), (3, 1, 64), (7, 100, 320), (8, 33, 96), (70, 90, 1536)],
)
def test_linear_is_the_quantized_product(
    kernels: Kernels, bits: int, rows: int, outputs: int, columns: int
) -> None:
    matrix, weights = packed(kernels, bits, outputs, columns)
    x = torch.randn(rows, columns)
    assert close(kernels.linear(x, matrix), reference.linear(x, weights))


@pytest.mark.parametrize("bits", [4, 8])
def test_extreme_weights_and_activations_do_not_overflow(kernels: Kernels, bits: int) -> None:
    """Every product at its largest magnitude, with all signs alike and with both signs."""
    q = torch.full((32, 64), 2**bits - 1, dtype=torch.uint8)
    q[16:] = 0
    ones, lows = torch.ones(32, 2).half(), torch.full((32, 2), -(2.0 ** (bits - 1))).half()
    x = torch.stack([torch.full((64,), 3.0), torch.full((64,), -3.0), 3.0 * (-1.0) ** torch.arange(64)])
    got = kernels.linear(x, affine(kernels, bits, q, ones, lows))
    assert close(got, reference.linear(x, reference.dequantize(q, ones, lows)))


def test_bias_and_residual_are_added(kernels: Kernels) -> None:
    matrix, weights = packed(kernels, 4, 40, 64)
    x, bias, residual = torch.randn(9, 64), torch.randn(40), torch.randn(9, 40)
    for extra in ({"bias": bias}, {"residual": residual}, {"bias": bias, "residual": residual}):
        assert close(kernels.linear(x, matrix, **extra), reference.linear(x, weights, **extra))


@pytest.mark.parametrize("bits", [4, 8])
def test_the_first_rows_of_a_part_are_a_part(kernels: Kernels, bits: int) -> None:
    matrix, _ = packed(kernels, bits, 90, 320)
    (part,), x = matrix.parts, torch.randn(3, 320)
    first = kernels.first_rows(part, 320, 48)
    assert first.data.data_ptr() == part.data.data_ptr()
    assert torch.equal(
        kernels.linear(x, kernels.matrix([first], 320)), kernels.linear(x, matrix)[:, :48].contiguous()
    )
    for rows in (0, 40, 96):
        with pytest.raises(ValueError, match=f"rows must be a multiple of 16 from 16 to 90, got {rows}"):
            kernels.first_rows(part, 320, rows)


def test_rows_may_be_strided(kernels: Kernels) -> None:
    matrix, _ = packed(kernels, 4, 40, 64)
    wide = torch.randn(9, 100)
    assert torch.equal(
        kernels.linear(wide[:, 5:69], matrix), kernels.linear(wide[:, 5:69].contiguous(), matrix)
    )


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_the_others(kernels: Kernels, bits: int) -> None:
    matrix, _ = packed(kernels, bits, 50, 320)
    x = torch.randn(70, 320)
    together = kernels.linear(x, matrix)
    for count in (1, 2, 3, 5, 8, 13):
        for first in (0, 31, 70 - count):
            part = slice(first, first + count)
            assert torch.equal(kernels.linear(x[part], matrix), together[part])


def test_threads_and_many_rows_leave_no_trace(kernels: Kernels) -> None:
    matrix, _ = packed(kernels, 4, 300, 96)
    x = torch.randn(300, 96)  # more rows than one task takes, more elements than one thread quantizes
    results = []
    for threads in (1, 2, 3):
        kernels.set_threads(threads)
        assert kernels.threads == threads
        results.append(kernels.linear(x, matrix))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[0][200:201], kernels.linear(x[200:201], matrix))


def test_fused_instruction_sets_agree_to_the_bit(best: Kernels, native: ModuleType) -> None:
    matrix, _ = packed(best, 8, 50, 320)
    x = torch.randn(5, 320)
    results = []
    for isa in ("avx512-vnni", "avx2"):
        try:
            native.set_isa(isa)
        except ValueError:
            pytest.skip(f"this processor cannot run {isa}")
        results.append(best.linear(x, matrix))
    assert torch.equal(*results)


def test_zero_tiny_and_not_a_number(kernels: Kernels) -> None:
    matrix, _ = packed(kernels, 4, 16, 64)
    x = torch.zeros(4, 64)
    x[1] = 1e-38
    x[2, 40] = float("nan")
    x[3, 40] = float("inf")
    got = kernels.linear(x, matrix)
    assert torch.equal(got[0], torch.zeros(16))
    assert torch.isfinite(got[1]).all()
    assert got[1].abs().max() < 1e-30
    assert not got[2:].isfinite().any()  # a broken row stays visibly broken


def test_no_rows_give_no_rows(kernels: Kernels) -> None:
    matrix, _ = packed(kernels, 4, 16, 64)
    assert kernels.linear(torch.empty(0, 64), matrix).shape == (0, 16)


def test_packing_loses_nothing_and_can_be_saved(kernels: Kernels) -> None:
    """The identity matrix reads the weights back, through a copy of the packed bytes."""
    matrix, weights = packed(kernels, 8, 37, 96)
    (part,) = matrix.parts
    again = kernels.matrix([replace(part, data=part.data.clone())], 96)
    assert again.nbytes == 3 * 3 * (64 + 512)
    assert torch.allclose(kernels.linear(torch.eye(96), again).T.double(), weights, rtol=1e-6, atol=1e-6)

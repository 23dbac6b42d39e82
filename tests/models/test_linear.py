"""Matrix products: right numbers in every format, and in exact numerics a row's bits are its own."""

import random

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from kakeya import kernels as native
from kakeya.kernels import Kernels
from kakeya.models.linear import (
    EXACT_TILE,
    FEW_ROWS,
    DenseLinear,
    FewRowsInt4Linear,
    Linear,
    PackedLinear,
    StackedLinear,
    TiledLinear,
    dense_linear,
    quantized_linear,
)
from kakeya.models.quantized import quantize
from kakeya.types import KernelChoice

FLOATS = [torch.float32, torch.bfloat16]


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    loaded = native.load(KernelChoice.NATIVE)
    assert loaded is not None
    return loaded


def weight_of(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * columns**-0.5


def check_product(linear: Linear, weight: Tensor, tolerance: float) -> None:
    """`linear` against float64, with and without bias and residual, for few and many rows."""
    for rows in (1, 3, 16, 17, 40):
        x, residual = torch.randn(rows, weight.shape[1]), torch.randn(rows, weight.shape[0])
        kept = residual.clone()
        expected = x.double() @ weight.double().T + 0.5
        found = linear(x)
        assert found.dtype == torch.float32
        assert (found - expected).abs().max() <= tolerance
        assert (linear(x, residual) - residual - expected).abs().max() <= tolerance
        assert torch.equal(residual, kept)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_dense_products(exact: bool, dtype: torch.dtype, tolerance: float) -> None:
    weight = weight_of(48, 100)
    linear = dense_linear(weight.to(dtype), torch.full((48,), 0.5), exact=exact, origin="bf16")
    assert isinstance(linear, TiledLinear if exact else DenseLinear)
    check_product(linear, weight, tolerance)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_integer_products_in_torch(bits: int, exact: bool, dtype: torch.dtype, tolerance: float) -> None:
    weight = quantize(weight_of(48, 96), bits)
    linear = quantized_linear(weight, torch.full((48,), 0.5), dtype=dtype, exact=exact, kernels=None)
    check_product(linear, weight.dequantize(), tolerance)


@pytest.mark.parametrize("bits", [4, 8])
def test_integer_products_in_native_kernels(bits: int, kernels: Kernels) -> None:
    weight = quantize(weight_of(48, 96), bits)
    linear = quantized_linear(
        weight, torch.full((48,), 0.5), dtype=torch.bfloat16, exact=True, kernels=kernels
    )
    assert isinstance(linear, PackedLinear)
    check_product(linear, weight.dequantize(), 0.06)  # activations are rounded to 8 bits


def test_formats_are_named() -> None:
    int4, int8 = quantize(weight_of(48, 96), 4), quantize(weight_of(48, 96), 8)
    odd = quantize(weight_of(50, 96), 4)  # torch packs 4 bits 16 rows at a time

    def name(weight, dtype, exact=False) -> str:  # noqa: ANN001
        [name] = quantized_linear(weight, None, dtype=dtype, exact=exact, kernels=None).formats
        return name

    assert name(int4, torch.bfloat16) == "int4, bf16 for many rows"
    assert name(int4, torch.bfloat16, exact=True) == "int4 held as bf16"
    assert name(odd, torch.bfloat16) == "int4 held as bf16"
    assert name(int4, torch.float32) == "int4 held as float32"
    assert name(int8, torch.bfloat16) == "int8 held as bf16"
    assert dense_linear(weight_of(4, 4), None, exact=False, origin="float32").formats == ("float32",)
    assert dense_linear(weight_of(4, 4), None, exact=False, origin="bf16").formats == (
        "bf16 held as float32",
    )


def test_few_rows_take_the_four_bit_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = FewRowsInt4Linear(quantize(weight_of(48, 96), 4), None, "int4")
    monkeypatch.setattr(linear, "_dense", None)
    linear(torch.randn(FEW_ROWS, 96))
    with pytest.raises(TypeError):
        linear(torch.randn(FEW_ROWS + 1, 96))


def check_rows_are_their_own(linear: Linear, columns: int, seed: int, rows: int) -> None:
    """Each of `rows` random rows, at its random place among the others, has the bits it has alone."""
    pool = torch.randn(12, columns, generator=torch.Generator().manual_seed(seed)) * 3
    alone = [linear(pool[index : index + 1])[0].clone() for index in range(len(pool))]
    chosen = random.Random(seed).choices(range(len(pool)), k=rows)
    together = linear(pool[chosen])
    for place, index in enumerate(chosen):
        assert torch.equal(together[place], alone[index]), (place, rows)


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=30)
@given(
    shape=st.sampled_from([(48, 32), (96, 576), (71, 48), (100, 33), (576, 96)]),
    rows=st.integers(1, 70),
    seed=st.integers(0, 2**31),
)
@torch.inference_mode()
def test_exact_rows_do_not_depend_on_each_other(
    dtype: torch.dtype, shape: tuple[int, int], rows: int, seed: int
) -> None:
    linear = dense_linear(weight_of(*shape).to(dtype), None, exact=True, origin="float32")
    check_rows_are_their_own(linear, shape[1], seed, rows)


@settings(max_examples=20)
@given(rows=st.integers(1, 70), seed=st.integers(0, 2**31), bits=st.sampled_from([4, 8]))
@torch.inference_mode()
def test_exact_integer_rows_do_not_depend_on_each_other(rows: int, seed: int, bits: int) -> None:
    weight = quantize(weight_of(64, 96), bits)
    linear = quantized_linear(weight, torch.randn(64), dtype=torch.bfloat16, exact=True, kernels=None)
    check_rows_are_their_own(linear, 96, seed, rows)


def test_tiles_are_all_of_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = []
    product = torch.mm

    def watched(left: Tensor, right: Tensor, *, out: Tensor) -> Tensor:
        shapes.append((tuple(left.shape), tuple(out.shape)))
        return product(left, right, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    linear = dense_linear(weight_of(8, 32), None, exact=True, origin="float32")
    for rows in (1, EXACT_TILE, EXACT_TILE + 1, 70):
        linear(torch.randn(rows, 32))
    assert set(shapes) == {((EXACT_TILE, 32), (EXACT_TILE, 8))}


def test_packed_parts_of_several_formats(kernels: Kernels) -> None:
    """Each row has the bits it has in a matrix of its own, wherever the tiles of its part begin."""
    weights = [quantize(weight_of(rows, 96), bits) for rows, bits in ((21, 4), (16, 8), (5, 4))]
    parts = [kernels.pack(weight.bits, weight.q, weight.scale, weight.minimum) for weight in weights]
    bias = torch.randn(42)
    whole = PackedLinear(kernels, parts, 96, bias, ("int4", "int8"))
    assert whole.formats == ("int4", "int8")
    assert whole.matrix.nbytes == sum(part.nbytes for part in parts)
    alone = [
        PackedLinear(kernels, [part], 96, own, ("one",))
        for part, own in zip(parts, bias.split([21, 16, 5]), strict=True)
    ]
    for rows in (1, 3, 17):
        x, residual = torch.randn(rows, 96), torch.randn(rows, 42)
        assert torch.equal(whole(x), torch.cat([part(x) for part in alone], dim=1))
        assert torch.allclose(whole(x, residual), whole(x) + residual, atol=1e-6)


def test_stacked_products_stand_beside_each_other(kernels: Kernels) -> None:
    dense, bias = weight_of(7, 96), torch.full((7,), 0.5)
    quantized = quantize(weight_of(48, 96), 8)
    options = {"dtype": torch.float32, "exact": False, "kernels": kernels}
    packed = quantized_linear(quantized, torch.full((48,), 0.5), **options)
    floats = dense_linear(dense, bias, exact=False, origin="float32")
    stacked = StackedLinear([packed, floats, packed])
    assert stacked.formats == ("int8", "float32")
    whole = torch.cat([quantized.dequantize(), dense, quantized.dequantize()])
    check_product(stacked, whole, 0.06)

"""Norms and gated activations against torch."""

import pytest
import torch

from kakeya.kernels import Kernels
from support import reference


@pytest.mark.parametrize("rows, columns", [(1, 1), (1, 576), (3, 16), (5, 33), (70, 100), (2, 1000)])
def test_rms_norm(kernels: Kernels, rows: int, columns: int) -> None:
    x, weight = 3.0 * torch.randn(rows, columns), torch.randn(columns)
    got = kernels.rms_norm(x, weight, 1e-5)
    assert torch.allclose(got, reference.rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    for row in range(0, rows, 3):
        assert torch.equal(kernels.rms_norm(x[row : row + 1], weight, 1e-5)[0], got[row])


def test_rms_norm_takes_strided_rows(kernels: Kernels) -> None:
    wide, weight = torch.randn(6, 50), torch.randn(20)
    part = wide[:, 3:23]
    assert torch.equal(
        kernels.rms_norm(part, weight, 1e-5), kernels.rms_norm(part.contiguous(), weight, 1e-5)
    )


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows, width", [(1, 16), (3, 5), (70, 100), (2, 1536)])
def test_gated(kernels: Kernels, activation: str, rows: int, width: int) -> None:
    gate_up = 4.0 * torch.randn(rows, 2 * width)
    got = kernels.gated(gate_up, activation)
    expected = reference.gated(gate_up, activation)
    assert torch.allclose(got, expected, rtol=2e-6, atol=1e-6)
    for row in range(0, rows, 3):
        assert torch.equal(kernels.gated(gate_up[row : row + 1], activation)[0], got[row])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_hold_far_from_zero(kernels: Kernels, activation: str) -> None:
    """Where exp overflows or vanishes the activation is still its limit."""
    gate = torch.tensor([-1e30, -200.0, -89.0, -88.0, -20.0, -0.0, 1e-20, 20.0, 88.0, 200.0, 1e30])
    got = kernels.gated(torch.cat([gate, torch.ones_like(gate)])[None], activation)[0]
    expected = reference.gated(torch.cat([gate, torch.ones_like(gate)])[None], activation)[0]
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_broken_row_stays_visibly_broken(kernels: Kernels) -> None:
    x = torch.randn(2, 64)
    x[1, 7] = float("nan")
    gated = kernels.gated(x, "silu")
    assert torch.isfinite(gated[0]).all()
    assert gated[1, 7].isnan()
    assert kernels.rms_norm(x, torch.ones(64), 1e-5)[1].isnan().all()


def test_many_elements_give_the_same_bits_on_any_number_of_threads(kernels: Kernels) -> None:
    x = torch.randn(300, 512)  # enough to be shared between threads and to let go of the interpreter
    results = []
    for threads in (1, 2, 3):
        kernels.set_threads(threads)
        results.append((kernels.rms_norm(x, torch.ones(512), 1e-5), kernels.gated(x, "silu")))
    for norm, gated in results[1:]:
        assert torch.equal(norm, results[0][0])
        assert torch.equal(gated, results[0][1])

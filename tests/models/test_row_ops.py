"""Operations on rows: what they compute, and that in exact numerics a row's bits are its own."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kakeya.models.row_ops import TorchRowOps, softcap


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@settings(max_examples=25)
@given(
    width=st.sampled_from([48, 64, 100, 1536, 33_000]), rows=st.integers(1, 30), seed=st.integers(0, 2**31)
)
@torch.inference_mode()
def test_exact_row_ops_do_not_depend_on_each_other(activation: str, width: int, rows: int, seed: int) -> None:
    ops = TorchRowOps(exact=True)
    x = torch.randn(rows, 2 * width, generator=torch.Generator().manual_seed(seed)) * 4
    gated, normed = ops.gated(x, activation), ops.rms_norm(x[:, :width], torch.ones(width), 1e-6)
    for row in range(rows):
        assert torch.equal(gated[row], ops.gated(x[row : row + 1].clone(), activation)[0])
        if width < 32_768:  # no model is wider
            assert torch.equal(
                normed[row], ops.rms_norm(x[row : row + 1, :width], torch.ones(width), 1e-6)[0]
            )


@pytest.mark.parametrize("exact", [False, True])
def test_row_ops_compute_what_they_say(exact: bool) -> None:
    ops = TorchRowOps(exact)
    x, weight = torch.randn(70, 2 * 640, dtype=torch.float64), torch.randn(1280, dtype=torch.float64)
    gate, up = x[:, :640], x[:, 640:]
    assert torch.allclose(ops.gated(x.float(), "silu").double(), gate * torch.sigmoid(gate) * up, atol=1e-5)
    tanh = torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))
    assert torch.allclose(ops.gated(x.float(), "gelu_tanh").double(), 0.5 * gate * (1 + tanh) * up, atol=1e-5)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight
    assert torch.allclose(ops.rms_norm(x.float(), weight.float(), 1e-3).double(), normed, atol=1e-5)


def test_softcap_by_rows() -> None:
    x = torch.randn(5, 301) * 40
    alone = torch.stack([softcap(row.clone()[None], 30.0)[0] for row in x])
    expected = 30.0 * torch.tanh(x / 30.0)
    capped = softcap(x, 30.0)
    assert torch.allclose(capped, expected)
    assert torch.equal(capped, alone)

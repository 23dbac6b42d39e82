"""What the door promises about layers in one call: bad arguments are named and change nothing.

That a network has the bits of its operations is tested where there are whole models: tests/engine.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kakeya.kernels import Kernels
from kakeya.kernels.network import AttentionContext, Network, NetworkLayer, NetworkProjection, NetworkShape

SHAPE = NetworkShape(
    hidden=32, inner=64, heads=2, kv_heads=1, head_dim=16, norms_span_heads=False, eps=1e-5, gelu=False
)
ROWS = 3


def projection(kernels: Kernels, outputs: int, columns: int) -> NetworkProjection:
    q = torch.randint(0, 16, (outputs, columns), dtype=torch.uint8)
    scale, minimum = (
        torch.rand(outputs, columns // 32).half() / 64,
        -torch.rand(outputs, columns // 32).half() / 8,
    )
    return NetworkProjection(
        kernels.matrix([kernels.pack(4, q, scale, minimum)], columns), torch.randn(outputs)
    )


def layer_of(kernels: Kernels) -> NetworkLayer:
    return NetworkLayer(
        input_norm=torch.ones(32),
        query_norm=torch.ones(16),
        key_norm=torch.ones(16),
        post_attention_norm=None,
        mlp_norm=torch.ones(32),
        post_mlp_norm=None,
        qkv=projection(kernels, 64, 32),
        output=projection(kernels, 32, 32),
        gate_up=projection(kernels, 128, 32),
        down=projection(kernels, 32, 64),
        local_window=None,
    )


def network_of(kernels: Kernels) -> Network:
    return kernels.network(SHAPE, [layer_of(kernels), replace(layer_of(kernels), local_window=4)])


def attention() -> AttentionContext:
    table = torch.ones(ROWS, 8)
    return AttentionContext(
        tables=[(table, table, table, table)] * 2,
        pool=torch.zeros(2, 2, 2, 1, 10, 16),
        segments=torch.tensor([[0, 0, 2, 0], [1, 2, 1, 5]]),
        sinks=torch.tensor([2, 0]),
        capacity=8,
        scale=0.25,
        softcap=0.0,
    )


def test_the_sound_call_is_sound(best: Kernels) -> None:
    hidden, context = torch.randn(ROWS, 32), attention()
    before = hidden.clone()
    best.run_network(network_of(best), hidden, context)
    assert torch.isfinite(hidden).all()
    assert not torch.equal(hidden, before)
    assert bool(context.pool.count_nonzero())


BAD_LAYERS: dict[str, tuple[Callable[[Kernels], dict[str, object]], str]] = {
    "norm dtype": (
        lambda _: {"input_norm": torch.ones(32).double()},
        r"input_norm must be contiguous float32 \[32\], got float64 \[32\]",
    ),
    "norm size": (lambda _: {"mlp_norm": torch.ones(16)}, r"mlp_norm must be .*\[32\], got float32 \[16\]"),
    "head norm": (lambda _: {"query_norm": torch.ones(32)}, r"query_norm must be .*\[16\]"),
    "strides": (lambda _: {"key_norm": torch.ones(32)[::2]}, "key_norm must be contiguous"),
    "matrix": (lambda k: {"down": projection(k, 32, 32)}, r"down must be \[32, 64\], got \[32, 32\]"),
    "bias": (
        lambda k: {"qkv": replace(projection(k, 64, 32), bias=torch.ones(32))},
        r"the bias of qkv must be .*\[64\], got float32 \[32\]",
    ),
}


@pytest.mark.parametrize("name", BAD_LAYERS)
def test_weights_that_do_not_fit_are_named(best: Kernels, name: str) -> None:
    changes, message = BAD_LAYERS[name]
    with pytest.raises(ValueError, match=message):
        best.network(SHAPE, [replace(layer_of(best), **changes(best))])  # type: ignore[arg-type]


def test_norms_over_the_width_are_as_wide(best: Kernels) -> None:
    shape = replace(SHAPE, norms_span_heads=True)
    wide = replace(layer_of(best), query_norm=torch.ones(32))
    assert best.network(shape, [wide]).layers == [wide]
    with pytest.raises(ValueError, match=r"query_norm must be .*\[32\], got float32 \[16\]"):
        best.network(shape, [layer_of(best)])


SHORT = (torch.ones(ROWS - 1, 8),) * 4
BAD_STEPS: dict[str, tuple[dict[str, object], str]] = {
    "too few tables": ({"tables": [SHORT]}, "1 tables for 2 layers"),
    "table of other rows": ({"tables": [SHORT, SHORT]}, r"cos and sin must be contiguous float32 \[3, 8\]"),
    "pool type": ({"pool": torch.zeros(2, 2, 2, 1, 10, 16).half()}, "pool must be contiguous float32 or bf"),
    "pool of fewer layers": ({"pool": torch.zeros(2, 1, 2, 1, 10, 16)}, "layer 1 and capacity 8 do not fit"),
    "capacity": ({"capacity": 11}, "layer 1 and capacity 11 do not fit"),
    "sinks": ({"sinks": torch.zeros(2, dtype=torch.int32)}, r"contiguous int64 \[n, 4\] and \[n\]"),
    "slab": ({"segments": torch.tensor([[0, 0, 2, 0], [2, 2, 1, 5]])}, "segment 1: no slab 2"),
    "rows": ({"segments": torch.tensor([[0, 0, 1, 0], [1, 2, 1, 5]])}, "segments must cover the rows"),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_bad_steps_are_named_and_write_nothing(best: Kernels, name: str) -> None:
    changes, message = BAD_STEPS[name]
    hidden, context = torch.randn(ROWS, 32), replace(attention(), **changes)  # type: ignore[arg-type]
    before = hidden.clone()
    with pytest.raises(ValueError, match=message):
        best.run_network(network_of(best), hidden, context)
    assert torch.equal(hidden, before)
    assert not context.pool.count_nonzero()


@pytest.mark.parametrize(
    "hidden, message",
    [
        (torch.zeros(ROWS, 64)[:, :32], r"hidden must be contiguous float32 \[3, 32\]"),
        (torch.zeros(32, ROWS).T, r"hidden must be float32 \[rows, 32\] with contiguous rows"),
        (torch.zeros(ROWS, 16), r"hidden must be float32 \[rows, 32\]"),
        (torch.zeros(ROWS, 32).double(), "got float64"),
    ],
    ids=["gaps", "transposed", "width", "dtype"],
)
def test_hidden_states_that_cannot_be_changed_in_place(
    best: Kernels, hidden: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        best.run_network(network_of(best), hidden, attention())


@pytest.mark.parametrize("first, end", [(0, 3), (-1, 1), (1, 1), (2, 1)])
def test_layers_that_a_network_has_not(best: Kernels, first: int, end: int) -> None:
    hidden, context = torch.randn(ROWS, 32), attention()
    before = hidden.clone()
    with pytest.raises(ValueError, match=f"layers {first} to {end} are none of 2"):
        best.run_network(network_of(best), hidden, context, first, end)
    assert torch.equal(hidden, before)
    assert not context.pool.count_nonzero()


def test_layers_one_by_one_are_all_layers(best: Kernels) -> None:
    network, together = network_of(best), torch.randn(ROWS, 32)
    apart, one, other = together.clone(), attention(), attention()
    best.run_network(network, together, one)
    best.run_network(network, apart, other, 0, 1)
    best.run_network(network, apart, other, 1)
    assert torch.equal(apart, together)
    assert torch.equal(one.pool, other.pool)

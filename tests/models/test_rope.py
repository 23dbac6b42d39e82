"""Rotary tables: plain angles, bits that are a row's own, far positions, senseless settings."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from kakeya.errors import CorruptCheckpoint
from kakeya.models.rope import (
    DivisorScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    YarnScaling,
    inverse_frequencies,
    rope_tables,
    yarn_attention_factor,
)

PLAIN = RopeConfig(10_000.0, 16)


def test_plain_angles() -> None:
    cos, sin = rope_tables(PLAIN, [0, 1, 5])
    assert cos.dtype == sin.dtype == torch.float32
    assert cos.shape == sin.shape == (3, 8)
    for row, position in enumerate((0, 1, 5)):
        for pair in range(8):
            angle = position * 10_000.0 ** (-pair / 8)
            assert cos[row, pair] == pytest.approx(math.cos(angle), abs=1e-6)
            assert sin[row, pair] == pytest.approx(math.sin(angle), abs=1e-6)


def test_far_positions_are_as_good_as_near_ones() -> None:
    position = 10_000_000
    cos, _ = rope_tables(PLAIN, np.array([position]))
    exact = [math.cos(position * float(frequency)) for frequency in inverse_frequencies(PLAIN)]
    assert np.allclose(cos[0].numpy(), exact, atol=1e-7)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=9), st.sampled_from([6, 16, 64, 80]))
def test_a_row_depends_on_its_own_position_alone(positions: list[int], head_dim: int) -> None:
    rope = RopeConfig(1e6, head_dim)
    cos, sin = rope_tables(rope, positions)
    for row, position in enumerate(positions):
        alone_cos, alone_sin = rope_tables(rope, [position])
        assert torch.equal(cos[row], alone_cos[0])
        assert torch.equal(sin[row], alone_sin[0])


def test_divisors_equal_the_scaling_they_spell_out() -> None:
    llama3 = RopeConfig(500_000.0, 64, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    plain = inverse_frequencies(RopeConfig(500_000.0, 64))
    divisors = DivisorScaling(tuple(plain / inverse_frequencies(llama3)))
    assert divisors.divisors[0] == 1.0
    assert divisors.divisors[-1] == 8.0
    assert np.allclose(inverse_frequencies(RopeConfig(500_000.0, 64, divisors)), inverse_frequencies(llama3))


def test_yarn_ramp_between_kept_and_divided() -> None:
    yarn = YarnScaling(4.0, 4096, yarn_attention_factor(4.0))
    ratio = inverse_frequencies(RopeConfig(10_000.0, 128)) / inverse_frequencies(
        RopeConfig(10_000.0, 128, yarn)
    )
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(4.0)
    assert np.all(np.diff(ratio) >= 0)
    cos, _ = rope_tables(RopeConfig(10_000.0, 128, yarn), [0])
    assert cos[0, 0] == pytest.approx(0.1 * math.log(4.0) + 1.0)


def test_yarn_whose_ramp_has_no_width() -> None:
    # Both bounds fall on dimension 0: a step, and no division by zero.
    yarn = YarnScaling(2.0, 6, 1.0, beta_fast=1.0, beta_slow=1.0)
    frequencies = inverse_frequencies(RopeConfig(10_000.0, 8, yarn))
    assert np.all(np.isfinite(frequencies))
    assert frequencies[-1] == pytest.approx(inverse_frequencies(RopeConfig(10_000.0, 8))[-1] / 2)


@pytest.mark.parametrize(
    "factor, mscales, expected", [(1.0, (), 1.0), (0.5, (), 1.0), (math.e, (2.0, 1.0), 1.2 / 1.1)]
)
def test_yarn_attention_factor(factor: float, mscales: tuple[float, ...], expected: float) -> None:
    assert yarn_attention_factor(factor, *mscales) == pytest.approx(expected)


def test_frequencies_cannot_be_changed_by_a_reader() -> None:
    with pytest.raises(ValueError, match="read-only"):
        inverse_frequencies(PLAIN)[0] = 2.0


@pytest.mark.parametrize(
    "theta, scaling, message",
    [
        (1.0, None, "theta must be greater than 1"),
        (math.nan, None, "theta must be greater than 1"),
        (1e4, LinearScaling(0.0), "factor must be positive"),
        (1e4, YarnScaling(-1.0, 32, 1.0), "factor must be positive"),
        (1e4, Llama3Scaling(8.0, 4.0, 4.0, 64), "high_freq_factor greater"),
        (1e4, DivisorScaling((1.0, 2.0)), "4 positive numbers"),
        (1e4, DivisorScaling((1.0, 2.0, 0.0, 4.0)), "4 positive numbers"),
    ],
)
def test_senseless_settings(theta: float, scaling: LinearScaling | None, message: str) -> None:
    with pytest.raises(CorruptCheckpoint, match=message):
        RopeConfig(theta, 8, scaling)


def test_a_head_rotated_in_part_turns_as_its_first_dimensions_alone() -> None:
    """What is reordered, turned as a whole head and put back is what the partial rotation says."""
    rope = RopeConfig(500.0, 16, rotated=12)
    order = torch.tensor(rope.paired_order())
    assert sorted(order.tolist()) == list(range(16))
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    cos, sin = rope_tables(rope, range(5))
    first, second = x[:, order].chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    back = torch.empty_like(x)
    back[:, order] = turned
    cos, sin = rope_tables(RopeConfig(500.0, 12), range(5))
    first, second = x[:, :12].chunk(2, dim=-1)
    expected = torch.cat([first * cos - second * sin, second * cos + first * sin, x[:, 12:]], dim=-1)
    assert torch.equal(back, expected)


def test_a_layer_without_positions_never_turns() -> None:
    rope = RopeConfig.unrotated(8)
    cos, sin = rope_tables(rope, [0, 10**7])
    assert torch.equal(cos, torch.ones(2, 4))
    assert torch.equal(sin, torch.zeros(2, 4))
    assert rope.paired_order() is None
    assert RopeConfig(500.0, 8).paired_order() is None


def test_pairs_that_do_not_turn_do_not_grow() -> None:
    rope = RopeConfig(500.0, 8, DivisorScaling((1.0, math.inf), attention_factor=2.0), rotated=4)
    cos, _ = rope_tables(rope, [0, 3])
    assert cos[0].tolist() == [2.0, 1.0, 1.0, 1.0]
    assert cos[1, 1:].tolist() == [1.0, 1.0, 1.0]


def test_the_capacity_of_the_cache_chooses_longropes_divisors() -> None:
    scaling = LongRopeScaling((1.0, 2.0), (3.0, 4.0), original_positions=64, attention_factor=1.5)
    rope = RopeConfig(500.0, 4, scaling)
    assert rope.within(64).scaling == DivisorScaling((1.0, 2.0), 1.5)
    assert rope.within(65).scaling == DivisorScaling((3.0, 4.0), 1.5)
    assert rope.attention_factor == rope.within(64).attention_factor == 1.5
    assert RopeConfig(500.0, 4).within(64) == RopeConfig(500.0, 4)
    with pytest.raises(AssertionError, match="use `within` first"):
        rope_tables(rope, [0])

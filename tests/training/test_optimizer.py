"""AdamW as torch has it, and the running average."""

import pytest
import torch
from torch import Tensor

from kakeya.training.optimizer import Optimizer, follow


def plain_adamw(gradients: list[float], weight: float, rate: float, decay: float) -> float:
    """One number's way, as the paper tells it."""
    mean = square = 0.0
    for step, gradient in enumerate(gradients, 1):
        mean, square = 0.9 * mean + 0.1 * gradient, 0.95 * square + 0.05 * gradient**2
        weight -= rate * decay * weight
        weight -= rate * (mean / (1 - 0.9**step)) / ((square / (1 - 0.95**step)) ** 0.5 + 1e-8)
    return weight


def test_it_is_adamw() -> None:
    """With decay for matrices alone, and the gradients clipped as a whole."""
    torch.manual_seed(0)
    weights = {"matrix": torch.randn(4, 3, requires_grad=True), "vector": torch.randn(5, requires_grad=True)}
    begun = {name: weight.detach().clone() for name, weight in weights.items()}
    optimizer, gradients = Optimizer.of(weights), {"matrix": list[Tensor](), "vector": list[Tensor]()}
    for step in range(5):
        drawn = {name: torch.randn(weight.shape) for name, weight in weights.items()}
        norm = torch.cat([each.flatten() for each in drawn.values()]).norm()
        for name, weight in weights.items():
            weight.grad = drawn[name].clone()
            gradients[name].append(drawn[name] / norm.clamp(min=1.0))
        optimizer.update(weights, 0.1, step)
        assert all(weight.grad is None for weight in weights.values())
    for name, decay in (("matrix", 0.01), ("vector", 0.0)):
        ways = torch.stack(gradients[name], -1).flatten(0, -2).tolist()
        starts = begun[name].flatten().tolist()
        expected = [plain_adamw(way, start, 0.1, decay) for way, start in zip(ways, starts, strict=True)]
        assert weights[name].detach().flatten().tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_the_average_follows_quickly_at_first() -> None:
    average, weights = {"it": torch.zeros(1)}, {"it": torch.ones(1)}
    follow(average, weights, step=0)
    assert float(average["it"]) == pytest.approx(0.9)
    average["it"].zero_()
    follow(average, weights, step=100_000)
    assert float(average["it"]) == pytest.approx(0.002)

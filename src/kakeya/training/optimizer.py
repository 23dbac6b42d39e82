"""AdamW over named tensors, and a running average of them.

Torch's own is not used: it imports a compiler, which takes longer than a small training.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_BETAS = (0.9, 0.95)
_EPSILON = 1e-8
_DECAY = 0.01  # of matrices
_CLIP = 1.0
_AVERAGED = 0.998


@dataclass
class Optimizer:
    """Mean and square of each gradient so far. They are all that it remembers, beside the number of steps."""

    means: dict[str, Tensor]
    squares: dict[str, Tensor]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> "Optimizer":
        return cls(*({name: torch.zeros_like(x) for name, x in weights.items()} for _ in range(2)))

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor], rate: float, step: int) -> None:
        """Change the weights by their gradients, which are used up. Steps count from 0."""
        torch.nn.utils.clip_grad_norm_(list(weights.values()), _CLIP)
        grown, squares_grown = (1 - beta ** (step + 1) for beta in _BETAS)
        for name, weight in weights.items():
            assert weight.grad is not None, name
            mean, square = self.means[name], self.squares[name]
            mean.lerp_(weight.grad, 1 - _BETAS[0])
            square.mul_(_BETAS[1]).addcmul_(weight.grad, weight.grad, value=1 - _BETAS[1])
            spread = (square / squares_grown).sqrt_().add_(_EPSILON)
            if weight.ndim == 2:
                weight.mul_(1 - rate * _DECAY)
            weight.addcdiv_(mean, spread, value=-rate / grown)
            weight.grad = None


@torch.no_grad()
def follow(average: Mapping[str, Tensor], weights: Mapping[str, Tensor], step: int) -> None:
    """Move a running average of the weights, which guesses better than those of any one step."""
    share = max(1 - _AVERAGED, 9 / (step + 10))  # at first over fewer steps
    for name, each in average.items():
        each.lerp_(weights[name], share)

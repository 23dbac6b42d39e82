"""What the drafter's states at each place should have been: the loss, and its gradient, without autograd.

Half of the loss is the cross entropy of the token that came, half the divergence from the verifier's own
distribution there. The head is the verifier's and does not learn, so the gradient of the states is computed
right after their logits, a few conversations at a time: the logits of all of them would not fit in memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kakeya.training.verifier import SharedParts

_TOKEN_SHARE = 0.5
_LATER_WEIGHT = 0.9
_LOGITS_AT_ONCE = 2**28  # numbers: a gigabyte of float32

# by_logits(logits, the teacher's shares, tokens that came, soft cap): the gradient by the logits.
ByLogits = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


@dataclass(frozen=True)
class Targets:
    """What a batch is held against.

    The verifier's states [B, A + places - 1, n] are those from each run's first anchor + 1 on: place j of
    anchor a is taught by state a + j. `tokens` and `counts` [B, A, places] are the tokens that came, as
    places in the draft vocabulary, and whether they count.
    """

    teacher: Tensor
    tokens: Tensor
    counts: Tensor

    @property
    def places(self) -> int:
        return self.tokens.shape[2]


@dataclass(frozen=True)
class Figures:
    """Sums over a batch by place, [places] each: what was counted, the two losses, and right guesses."""

    counted: Tensor
    cross_entropy: Tensor
    divergence: Tensor
    right: Tensor

    @property
    def loss(self) -> float:
        """The mean loss of a place."""
        whole = _TOKEN_SHARE * self.cross_entropy + (1 - _TOKEN_SHARE) * self.divergence
        return float(whole.sum() / self.counted.sum().clamp(min=1))

    @property
    def acceptance(self) -> list[float]:
        """How often the most probable token was the one that came, by place."""
        shares: list[float] = (self.right / self.counted.clamp(min=1)).tolist()
        return shares


def place_weights(targets: Targets) -> Tensor:
    """[B, A, places]: what each place weighs in the loss. They sum up to 1."""
    places = torch.arange(targets.places, device=targets.counts.device)
    weights = targets.counts * _LATER_WEIGHT**places
    return weights / weights.sum().clamp(min=1)


@torch.no_grad()
def loss_gradient(
    shared: SharedParts,
    states: Sequence[Tensor],
    targets: Targets,
    *,
    measure: bool,
    by_logits: ByLogits | None = None,
) -> tuple[list[Tensor], Figures | None]:
    """The gradient of the loss by the states of each place, [B, A, n] each, and figures if asked for.

    `by_logits` may be what `compiled_by_logits` made.
    """
    by_logits = by_logits or _by_logits
    weights = place_weights(targets)
    gradients = [torch.empty_like(state) for state in states]
    figures = torch.zeros(4, targets.places, device=weights.device)
    at_once = _conversations_at_once(targets, len(shared.head))
    for first in range(0, len(weights), at_once):
        part = slice(first, first + at_once)
        taught = shared.logits(targets.teacher[part]).softmax(-1, dtype=torch.float32)
        for place, state in enumerate(states):
            logits = shared.logits(state[part])
            teacher = taught[:, place : place + logits.shape[1]]
            tokens, counts = targets.tokens[part, :, place], targets.counts[part, :, place]
            if measure:
                figures[:, place] += _figures(logits, teacher, tokens, counts)
            gradient = by_logits(logits, teacher, tokens, shared.model.logit_softcap) @ shared.head
            gradients[place][part] = gradient * weights[part, :, place, None]
    return gradients, Figures(*figures.cpu()) if measure else None


def _conversations_at_once(targets: Targets, vocab_size: int) -> int:
    """As many as memory allows, in parts of one size."""
    count, rows = targets.teacher.shape[:2]
    parts = -(-count * rows * vocab_size // _LOGITS_AT_ONCE)
    return -(-count // min(parts, count))


def _by_logits(logits: Tensor, teacher: Tensor, tokens: Tensor, softcap: float | None) -> Tensor:
    """The gradient by the head's outputs, in their element type: what is there minus what should be."""
    gradient = logits.softmax(-1, dtype=torch.float32)
    gradient.sub_(teacher, alpha=1 - _TOKEN_SHARE)
    came = torch.full_like(tokens, -_TOKEN_SHARE, dtype=torch.float32)
    gradient.scatter_add_(-1, tokens[..., None], came[..., None])
    if softcap is not None:
        gradient.mul_(1 - (logits.float() / softcap) ** 2)
    return gradient.to(logits.dtype)


def compiled_by_logits() -> ByLogits:
    """The same in one pass over the logits. Compiling takes a while, once for each shape of a batch."""

    def fused(logits: Tensor, teacher: Tensor, tokens: Tensor, softcap: float | None) -> Tensor:
        ids = torch.arange(logits.shape[-1], device=logits.device)
        taught = (1 - _TOKEN_SHARE) * teacher + _TOKEN_SHARE * (ids == tokens[..., None])
        gradient = logits.softmax(-1, dtype=torch.float32) - taught
        if softcap is not None:
            gradient = gradient * (1 - (logits.float() / softcap) ** 2)
        return gradient.to(logits.dtype)

    compiled: ByLogits = torch.compile(fused, dynamic=False)
    return compiled


def _figures(logits: Tensor, teacher: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    log_share = logits.log_softmax(-1, dtype=torch.float32)
    cross_entropy = -log_share.gather(-1, tokens[..., None])[..., 0]
    divergence = (torch.special.xlogy(teacher, teacher) - teacher * log_share).sum(-1)
    right = logits.argmax(-1) == tokens
    return torch.stack([(x * counts).sum() for x in (counts.float(), cross_entropy, divergence, right)])

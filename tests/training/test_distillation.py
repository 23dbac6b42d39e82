"""The gradient that is computed by hand is that of the loss as it is told."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from kakeya.models.checkpoint import Checkpoint
from kakeya.training import distillation
from kakeya.training.distillation import Targets, compiled_by_logits, loss_gradient, place_weights
from kakeya.training.verifier import SharedParts

BATCH, ANCHORS, PLACES = 3, 4, 2


@pytest.fixture
def shared(checkpoint: Checkpoint) -> SharedParts:
    return SharedParts.of(checkpoint, torch.device("cpu"), torch.float32)


@pytest.fixture
def targets(shared: SharedParts) -> Targets:
    torch.manual_seed(0)
    width = shared.model.hidden_size
    return Targets(
        torch.randn(BATCH, ANCHORS + PLACES - 1, width),
        torch.randint(len(shared.head), (BATCH, ANCHORS, PLACES)),
        torch.rand(BATCH, ANCHORS, PLACES) < 0.7,
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("at_once", [1, 2**28])
@pytest.mark.parametrize("compiled", [False, True])
def test_it_is_the_gradient_of_the_loss(
    shared: SharedParts,
    targets: Targets,
    softcap: float | None,
    at_once: int,
    compiled: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A compiler takes a minute here, and would compute the same.
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(distillation, "_LOGITS_AT_ONCE", at_once)
    shared = replace(shared, model=replace(shared.model, logit_softcap=softcap))
    states = [
        torch.randn(BATCH, ANCHORS, shared.model.hidden_size, requires_grad=True) for _ in range(PLACES)
    ]
    gradients, figures = loss_gradient(
        shared, states, targets, measure=True, by_logits=compiled_by_logits() if compiled else None
    )
    weights, loss, plain = place_weights(targets), torch.zeros(()), torch.zeros(())
    for place, state in enumerate(states):
        log_share = shared.logits(state).log_softmax(-1)
        teacher = shared.logits(targets.teacher[:, place : place + ANCHORS]).softmax(-1)
        came = -log_share.gather(-1, targets.tokens[:, :, place, None])[..., 0]
        apart = functional.kl_div(log_share, teacher, reduction="none").sum(-1)
        loss = loss + ((came + apart) / 2 * weights[..., place]).sum()
        plain = plain + ((came + apart) / 2 * targets.counts[..., place]).sum()
    expected = torch.autograd.grad(loss, states)
    for mine, its in zip(gradients, expected, strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=1e-4)
    assert figures is not None
    assert figures.loss == pytest.approx(float(plain.detach() / targets.counts.sum()), rel=1e-4)
    right = (torch.stack([shared.logits(state).argmax(-1) for state in states], -1) == targets.tokens).float()
    shares = (right * targets.counts).sum((0, 1)) / targets.counts.sum((0, 1))
    assert figures.acceptance == pytest.approx(shares.tolist())


def test_later_places_weigh_less_and_all_weigh_one(targets: Targets) -> None:
    weights = place_weights(replace(targets, counts=torch.ones_like(targets.counts)))
    assert float(weights.sum()) == pytest.approx(1.0)
    assert float(weights[0, 0, 1] / weights[0, 0, 0]) == pytest.approx(0.9)


def test_figures_only_if_asked_for(shared: SharedParts, targets: Targets) -> None:
    states = [torch.randn(BATCH, ANCHORS, shared.model.hidden_size) for _ in range(PLACES)]
    assert loss_gradient(shared, states, targets, measure=False)[1] is None

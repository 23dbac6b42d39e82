"""What differs between devices: when one is lost."""

import pytest
import torch

from kakeya.engine import device
from support.engines import FAULT, fault


@pytest.mark.parametrize(
    "answer", [None, fault(), RuntimeError(FAULT), RuntimeError("Triton Error [CUDA]: unspecified")]
)
def test_a_device_is_lost_when_it_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, answer: Exception | None
) -> None:
    def synchronize(asked: torch.device) -> None:
        assert asked == torch.device("cuda", 0)
        if answer is not None:
            raise answer

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert device.is_lost(torch.device("cuda", 0)) is (answer is not None)
    assert device.is_lost(torch.device("cpu")) is False

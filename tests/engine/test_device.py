"""What differs between devices: when one is lost, and how copies are made."""

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.uint8, torch.int64])
def test_a_copy_beside_the_engine_has_the_same_bits(dtype: torch.dtype) -> None:
    source = torch.arange(48).reshape(4, 3, 4).to(dtype)
    target = torch.zeros(4, 5, 4, dtype=dtype)
    device.copy_beside(target[:, :3], source)
    assert torch.equal(target[:, :3], source)
    assert not target[:, 3:].any()


def test_a_copy_to_a_device_does_not_wait() -> None:
    """Nothing but the device's own copy is called where one of the two lies on a device."""
    source, target = torch.ones(3), torch.empty(3, device="meta")
    device.copy_beside(target, source)
    assert target.shape == (3,)

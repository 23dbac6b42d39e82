"""What differs between devices when work is waited for and memory travels. On a CPU nothing has to wait."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


class Moment:
    """A point in a device's work, set by `record`. On a CPU all that came before it is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self) -> "Moment":
        """It is now, in the work that this thread has given the device."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
        return self

    def wait(self) -> None:
        """Until the device has come so far. Other threads run meanwhile."""
        if self._event is not None:
            self._event.synchronize()

    def hold_back(self) -> None:
        """What this thread gives the device from here on runs after it."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


def is_lost(device: torch.device) -> bool:
    """Whether the device has failed for good. Waits for what it still computes.

    After a fault in a kernel every call fails with that fault, whoever makes it, so one more call tells.
    The words of an error do not: torch, Triton and the libraries have different ones, and the same for what
    failed only once.
    """
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


@contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Work given meanwhile by this thread does not wait for the device's other work, nor holds it up."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_side_stream(device)):
        yield


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all: memory that was used on a stream is kept for that stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def fetched(tensor: Tensor, after: Moment | None) -> Tensor:
    """A host copy of what `tensor` holds once `after` has come."""
    if after is None or tensor.device.type == "cpu":
        return tensor.cpu()
    with aside(tensor.device):
        after.hold_back()
        return tensor.cpu()


def delivered(tensor: Tensor, device: torch.device) -> tuple[Tensor, Moment]:
    """A copy on `device`, and the moment from which on it is whole."""
    with aside(device):
        copy = tensor.to(device)
        return copy, Moment(device).record()


def received(tensor: Tensor, after: Moment | None) -> Tensor:
    """The delivered tensor, for work that this thread gives the device from here on."""
    if after is not None:
        after.hold_back()
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def host_buffer(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory that `device` can copy from and to while the host goes on."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")

"""What differs between devices in waiting, in free memory and in copies. On a CPU nothing has to wait."""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kakeya.models.fitting import available_memory

CPU = torch.device("cpu")
_HUGE_PAGE = 2 * 2**20
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def free_memory(device: torch.device) -> int:
    """Bytes that can be had on `device`."""
    return available_memory() if device.type != "cuda" else int(torch.cuda.mem_get_info(device)[0])


def use_huge_pages(tensor: Tensor) -> None:
    """Ask the system to lay untouched memory out in huge pages, where it has them.

    Attention reads a session's keys and values in one long run. With pages of 4 KB it waits for a new page
    every few slots.
    """
    if tensor.device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    first = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    length = tensor.data_ptr() + tensor.nbytes - first
    if length >= _HUGE_PAGE:
        with suppress(AttributeError):  # another C library
            # Whatever it answers, the memory can be used.
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_HUGEPAGE)
            )


class DeviceEvent:
    """A point in a device's work, set by `record`. On a CPU all that came before it is done already."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self) -> "DeviceEvent":
        """Set it behind the work that this thread has given the device so far."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))
        return self

    def wait(self) -> None:
        """Wait until the device has got this far. Other threads can run while this one waits."""
        if self._event is not None:
            self._event.synchronize()

    def block_stream(self) -> None:
        """Let the work that this thread gives the device from here on wait for it."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)


def is_lost(device: torch.device) -> bool:
    """Whether the device has failed for good. Waits for what it still computes.

    After a fault in a kernel every later call fails, so one more call tells. The message of an error does
    not: torch, Triton and the libraries word it differently, and use the same words for what failed once.
    """
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


@contextmanager
def on_side_stream(device: torch.device) -> Iterator[None]:
    """Run the body's work on the device's side stream, beside its other work."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_side_stream(device)):
        yield


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all callers: torch keeps memory that was used on a stream for that stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def fetch(tensor: Tensor, after: DeviceEvent | None) -> Tensor:
    """Copy to the host what `tensor` holds once the device has got to `after`."""
    if after is None or tensor.device.type == "cpu":
        return tensor.cpu()
    with on_side_stream(tensor.device):
        after.block_stream()
        return tensor.cpu()


def deliver(tensor: Tensor, device: torch.device) -> tuple[Tensor, DeviceEvent]:
    """Start a copy to `device`; the copy, and the event from which on it is whole."""
    with on_side_stream(device):
        copy = tensor.to(device)
        return copy, DeviceEvent(device).record()


def receive(tensor: Tensor, after: DeviceEvent | None) -> Tensor:
    """Use a delivered tensor in the work that this thread gives the device from here on."""
    if after is not None:
        after.block_stream()
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def copy_beside(target: Tensor, source: Tensor) -> None:
    """Copy while the engine runs. The two have one type.

    On a CPU this thread does it alone: of several, each would wait for a core that a step uses.
    """
    if target.is_cpu and source.is_cpu:
        bits = _BITS[target.itemsize]  # numpy does not know all types
        np.copyto(target.view(bits).numpy(), source.view(bits).numpy())
    else:
        target.copy_(source, non_blocking=True)


def host_buffer(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in host memory that `device` can copy from and to while the host goes on."""
    return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")

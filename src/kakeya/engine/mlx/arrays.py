"""Between torch and MLX: the same memory where both can see it, copies where they cannot."""

import threading
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MLX_TYPES = {torch.float32: mx.float32, torch.bfloat16: mx.bfloat16}


def shared_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[mx.array, Tensor]:
    """Zeros as an MLX array and as a tensor over the same memory: what is written to one, the other has.

    MLX shows its memory to others as a buffer, on a Mac as well, where the GPU uses the same. It has no
    buffers of bfloat16, so the array then has the bits as uint16.
    """
    array = mx.zeros(shape, dtype=mx.uint16 if dtype == torch.bfloat16 else MLX_TYPES[dtype])
    mx.eval(array)
    return array, torch.frombuffer(memoryview(array), dtype=dtype).view(shape)  # type: ignore[arg-type]


def to_mlx(tensor: Tensor) -> mx.array:
    """A copy of float32, bfloat16 or integers. It is evaluated: another thread may use it."""
    tensor = tensor.contiguous()
    if tensor.dtype != torch.bfloat16:
        return mx.array(tensor.numpy())
    array = mx.array(tensor.view(torch.uint16).numpy()).view(mx.bfloat16)
    mx.eval(array)
    return array


def bits_of(array: mx.array) -> mx.array:
    """The same numbers in a type that `to_torch` can read."""
    return array.view(mx.uint16) if array.dtype == mx.bfloat16 else array


def to_torch(array: mx.array, dtype: torch.dtype = torch.float32) -> Tensor:
    """A view of an evaluated array, which is `bits_of` numbers of type `dtype`."""
    seen: npt.NDArray[Any] = np.asarray(array)
    tensor = torch.from_numpy(seen)
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


class _Ending:
    """Lives as long as the thread that made it, in the thread's local storage."""

    def __del__(self) -> None:
        mx.clear_streams()


class _OfThread(threading.local):
    def __init__(self) -> None:
        self.ending = _Ending()


_of_thread = _OfThread()


def end_streams_with_thread() -> None:
    """Call before this thread computes anything.

    MLX gives every thread streams of its own. It aborts the process at its end where one is left of a thread
    that has run a compiled function.
    """
    _of_thread.ending  # noqa: B018 - makes it, the first time in a thread

"""Tells the end of the device from errors that anything may raise once."""

from collections.abc import Callable
from typing import TypeVar

from kakeya.engine.runner import Backend
from kakeya.errors import DeviceLost, KakeyaError

T = TypeVar("T")


class Watch:
    """Runs work that the device has a part in. Use it on the engine thread."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def __call__(self, work: Callable[[], T]) -> T:
        """What `work` gives or raises; DeviceLost where what it raised was the end of the device."""
        try:
            return work()
        except KakeyaError:
            raise  # in our own words, so the device is not what failed
        except Exception as error:
            self.raise_if_lost(error)
            raise

    def raise_if_lost(self, error: Exception) -> None:
        if self._backend.is_lost():
            fault = (str(error) or repr(error)).splitlines()[0]
            raise DeviceLost(f"the engine died: the device failed: {fault}") from error

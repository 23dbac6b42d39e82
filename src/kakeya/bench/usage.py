"""What processes use of the machine: memory, cores, open files.

`psutil` is imported where it is used: `bench gpu` also runs where it is not installed.
"""

import os
import resource
import time
from collections.abc import Sequence
from contextlib import suppress


def resident_bytes(pid: int | None = None) -> int | None:
    """Memory of a process, or of this one, that is in RAM right now; None once it is gone."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        # A process that has ended and that nobody waited for holds nothing.
        return psutil.Process(pid).memory_info().rss or None
    return None


class Bystanders:
    """How much of the machine others than `ours` use from now on: noise that no median removes.

    Nobody knows where one of ours, a process that somebody else started, is None.
    """

    def __init__(self, ours: Sequence[int | None]) -> None:
        self._ours = ours
        self._began = time.perf_counter()
        self._busy = self._others_busy_seconds()

    def share(self) -> float | None:
        """Of all cores together, time stolen by a hypervisor included; None when one of ours is gone."""
        busy = self._others_busy_seconds()
        if busy is None or self._busy is None:
            return None
        wall = time.perf_counter() - self._began
        return max(0.0, busy - self._busy) / (wall * (os.cpu_count() or 1))

    def _others_busy_seconds(self) -> float | None:
        import psutil

        if None in self._ours:
            return None
        times = psutil.cpu_times()._asdict()
        # Guests are in `user` and `nice` already.
        busy = sum(times.values()) - sum(times.get(name, 0.0) for name in _NOT_BUSY)
        try:
            own = [psutil.Process(pid).cpu_times() for pid in self._ours]
        except psutil.NoSuchProcess:
            return None
        return float(busy - sum(each.user + each.system for each in own))


_NOT_BUSY = ("idle", "iowait", "guest", "guest_nice")


def raise_descriptor_limit(wanted: int) -> dict[str, int]:
    """Allow this process and its children `wanted` open files, or as many as the system lets it ask for.

    Returns the limits before and after, and what was wanted.
    """
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if before != resource.RLIM_INFINITY and ceiling > before:
        resource.setrlimit(resource.RLIMIT_NOFILE, (ceiling, hard))
    after, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {"wanted": wanted, "before": before, "after": after}

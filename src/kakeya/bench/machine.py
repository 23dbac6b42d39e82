"""Facts about the machine and the software that a measurement depends on."""

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import kakeya

_CPUINFO = Path("/proc/cpuinfo")
_STATM = Path("/proc/self/statm")
_PROC = Path("/proc")


def machine_facts() -> dict[str, object]:
    """Processor, memory, system and versions, plus how busy the machine was at this moment."""
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "os": platform.platform(),
        "python": platform.python_version(),
        "torch": installed_version("torch"),
        "kakeya": kakeya.__version__,
        "load_average": list(os.getloadavg()),
    }


def public_name(model: str) -> str:
    """A model as reports name it: of a path only its end, since reports are for strangers."""
    return Path(model).name if Path(model).exists() else model


def cpu_model(cpuinfo: Path = _CPUINFO) -> str:
    """The processor's name as the system gives it."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def usable_cores() -> int:
    """Cores this process may run on, which a container may have limited."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None where it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def resident_bytes(statm: Path = _STATM) -> int:
    """Memory of this process that is in RAM right now."""
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    listing = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return int(listing.stdout) * 1024


class Bystanders:
    """How much of the machine others have used since this was made: noise that no median removes.

    `share` is of all cores together and counts time stolen by a hypervisor.
    It is None where the system does not tell.
    """

    def __init__(self, ours: Sequence[int], proc: Path = _PROC) -> None:
        self._ours, self._proc = ours, proc
        self._began = time.perf_counter()
        self._busy = self._others_busy_seconds()

    def share(self) -> float | None:
        busy = self._others_busy_seconds()
        if busy is None or self._busy is None:
            return None
        wall = time.perf_counter() - self._began
        return max(0.0, busy - self._busy) / (wall * (os.cpu_count() or 1))

    def _others_busy_seconds(self) -> float | None:
        if not (self._proc / "stat").exists():
            return None
        # cpu user nice system idle iowait irq softirq steal: all but the two kinds of waiting
        ticks = [int(field) for field in (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        busy = sum(ticks) - ticks[3] - ticks[4]
        return (busy - sum(map(self._ticks_of, self._ours))) / os.sysconf("SC_CLK_TCK")

    def _ticks_of(self, pid: int) -> int:
        # The name in parentheses may hold anything; user and system time come 12th and 13th after it.
        fields = (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

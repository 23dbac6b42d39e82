"""What the system tells about other processes, and what it allows this one."""

import resource
import subprocess
from pathlib import Path

from kakeya.bench.machine import Bystanders, resident_bytes

_PROC = Path("/proc")


def resident_bytes_of(pid: int, proc: Path = _PROC) -> int | None:
    """Memory of a process that is in RAM right now; None once it is gone."""
    if proc.exists():
        try:
            statm = proc / str(pid) / "statm"
            return resident_bytes(statm) if statm.read_text() else None
        except OSError:
            return None
    listing = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
    return int(listing.stdout) * 1024 if listing.stdout.strip() else None


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


def share_of(bystanders: Bystanders) -> float | None:
    """What others used of the machine; None when one of our own processes is gone, and its share with it."""
    try:
        return bystanders.share()
    except OSError:
        return None

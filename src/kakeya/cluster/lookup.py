"""Where the homes of a cluster on Ray are.

A process of its own asks, because a process that has joined Ray ends when Ray's head is gone for a while.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, field

from kakeya.errors import Unavailable

_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Found:
    """The cluster's secret and the addresses of its homes."""

    secret: str = field(repr=False)
    addresses: list[str]


def look_up(address: str) -> Found:
    """Ask Ray's head at `address`. Raises Unavailable when it does not answer, or has no such cluster."""
    command = [sys.executable, "-m", "kakeya.cluster.on_ray", address]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"Ray's head at {address} does not answer in {_TIMEOUT_S:g} s") from None
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        said = done.stderr.strip().splitlines()
        raise Unavailable(f"the cluster at {address} cannot be asked: {said[-1] if said else 'no answer'}")
    return Found(**json.loads(lines[-1]))

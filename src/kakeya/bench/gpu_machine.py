"""The device of `bench gpu`: what it is, how fast it copies and multiplies, and how work on it is timed."""

import re
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from kakeya.bench.gpu_plan import GpuPlan
from kakeya.bench.machine import installed_version
from kakeya.errors import ConfigError

_DRIVER = Path("/proc/driver/nvidia/version")
_WARM_UP = 3
# A copy is measured at several sizes, because the best one is what a step is held to.
_COPY_SHARES = (1, 2, 4)
_REPEATS = 7

Work = Callable[[], object]


def chosen_device(name: str) -> torch.device:
    """The device to measure. Raises ConfigError where torch sees none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("bench gpu needs a CUDA device; torch sees none")
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


def device_facts(device: torch.device) -> dict[str, Any]:
    """What the device is and which software drives it."""
    facts: dict[str, Any] = {
        "name": "CPU",
        "memory_bytes": None,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "triton": installed_version("triton"),
        "transformers": installed_version("transformers"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"name": properties.name, "memory_bytes": properties.total_memory}
    return facts


def driver_version(path: Path = _DRIVER) -> str | None:
    """The kernel module's version, as Linux tells it."""
    found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.exists() else None
    return found[0] if found else None


class PeakMemory:
    """The most that was allocated on the device since this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def peak_bytes(self) -> list[int]:
        """The peak so far, alone; nothing where it cannot be told."""
        return [torch.cuda.max_memory_allocated(self._device)] if self._device.type == "cuda" else []


def timed(device: torch.device, work: Work, repeats: int) -> list[float]:
    """Seconds of each repetition on the device.

    They are queued one behind the other, so that the time is the device's own: the host's launches are
    hidden, as they are when the engine runs ahead.
    """
    for _ in range(_WARM_UP):
        work()
    if device.type != "cuda":
        return [_elapsed(work) for _ in range(repeats)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return [float(start.elapsed_time(end)) / 1000 for start, end in pairwise(events)]


def _elapsed(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def median_seconds(device: torch.device, work: Work, repeats: int = _REPEATS) -> float:
    return statistics.median(timed(device, work, repeats))


def measured_rates(device: torch.device, plan: GpuPlan) -> dict[str, Any]:
    """Bytes a second of a large copy, read and written, and operations a second of a large bf16 product."""
    return {
        "copy_bytes_per_second": _copy_rate(device, plan.copy_bytes),
        "product_flops_per_second": _product_rate(device, plan.product_size),
    }


def _copy_rate(device: torch.device, size: int) -> float:
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rates = []
    for share in _COPY_SHARES:
        part = size // share
        copy = partial(target[:part].copy_, source[:part])
        rates.append(2 * part / median_seconds(device, copy))
    return max(rates)


def _product_rate(device: torch.device, size: int) -> float:
    left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    right = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(left)
    product = partial(torch.mm, left, right, out=out)
    return max(2 * size**3 / median_seconds(device, product) for _ in range(3))

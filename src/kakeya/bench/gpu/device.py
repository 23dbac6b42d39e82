"""The device of `bench gpu`: what it is, how fast it copies and multiplies, and how work on it is timed."""

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch

from kakeya.bench.gpu.plan import GpuPlan
from kakeya.bench.gpu.results import Machine
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


def device_facts(device: torch.device) -> Machine:
    """What the device is and which software drives it; its rates are not measured yet."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return Machine(
        name="CPU" if properties is None else properties.name,
        memory_bytes=None if properties is None else properties.total_memory,
        driver=driver_version(),
        cuda=torch.version.cuda,
        triton=installed_version("triton"),
        transformers=installed_version("transformers"),
    )


def driver_version(path: Path = _DRIVER) -> str | None:
    """The kernel module's version, as Linux tells it."""
    found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.exists() else None
    return found[0] if found else None


def timed(device: torch.device, work: Work, repeats: int) -> list[float]:
    """Seconds of each repetition on the device.

    They are queued one behind the other, so that the time is the device's own: the host's launches are
    hidden, as they are when the engine runs ahead.
    """
    for _ in range(_WARM_UP):
        work()
    if device.type != "cuda":
        stamps = [time.perf_counter()]
        for _ in range(repeats):
            work()
            stamps.append(time.perf_counter())
        return [end - start for start, end in pairwise(stamps)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        work()
        event.record()
    torch.cuda.synchronize(device)
    return [float(start.elapsed_time(end)) / 1000 for start, end in pairwise(events)]


def measured_machine(device: torch.device, plan: GpuPlan) -> Machine:
    return replace(
        device_facts(device),
        copy_bytes_per_second=_copy_rate(device, plan.copy_bytes),
        product_flops_per_second=_matmul_rate(device, plan.product_size),
    )


def _copy_rate(device: torch.device, total: int) -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.randint(0, 256, (total,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    sizes = [total // share for share in _COPY_SHARES]
    return max(2 * size / _median(device, partial(target[:size].copy_, source[:size])) for size in sizes)


def _matmul_rate(device: torch.device, size: int) -> float:
    """Operations a second of a large bf16 matmul."""
    left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    right = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    matmul = partial(torch.mm, left, right, out=torch.empty_like(left))
    return max(2 * size**3 / _median(device, matmul) for _ in range(3))


def _median(device: torch.device, work: Work) -> float:
    return statistics.median(timed(device, work, _REPEATS))


def free_bytes(device: torch.device) -> int | None:
    """What a device has left; None for one that does not tell."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> list[int]:
    """The most that was allocated since `reset_peak`, alone; nothing where it cannot be told."""
    return [torch.cuda.max_memory_allocated(device)] if device.type == "cuda" else []

"""The device of `bench gpu`: what it is, how fast it copies and multiplies, and how its work is timed."""

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
_REPEATS = 7

Work = Callable[[], object]


def open_device(name: str) -> torch.device:
    """The device to measure. Raises ConfigError if torch sees none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("bench gpu needs a CUDA device; torch sees none")
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


def device_facts(device: torch.device) -> Machine:
    """The device and its software, without rates."""
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
    """The version of the kernel module, as Linux tells it."""
    found = re.search(r"\d+\.\d+(\.\d+)?", path.read_text()) if path.exists() else None
    return found[0] if found else None


def timed(device: torch.device, work: Work, repeats: int) -> list[float]:
    """Seconds of each repetition on the device.

    Repetitions are queued one behind the other, so the time is the device's own: launches by the host are
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
    """The rates are those of a large copy, in bytes read and written, and of a large bf16 matmul."""

    def median(work: Work) -> float:
        return statistics.median(timed(device, work, _REPEATS))

    source = torch.randint(0, 256, (plan.copy_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # At several sizes: steps are compared with the best copy.
    sizes = [plan.copy_bytes // share for share in (1, 2, 4)]
    copy_rate = max(2 * size / median(partial(target[:size].copy_, source[:size])) for size in sizes)
    del source, target
    size = plan.product_size
    left, right, out = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(3))
    matmul_rate = max(2 * size**3 / median(partial(torch.mm, left, right, out=out)) for _ in range(3))
    return replace(
        device_facts(device), copy_bytes_per_second=copy_rate, product_flops_per_second=matmul_rate
    )


def free_bytes(device: torch.device) -> int | None:
    """Bytes that the device has left; None on a CPU."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None

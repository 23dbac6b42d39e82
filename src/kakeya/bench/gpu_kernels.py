"""The device kernels by themselves: each operation's time beside what memory, or the matrix units, allow."""

import gc
import logging
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kakeya.bench.gpu_machine import Work, timed
from kakeya.bench.gpu_operations import Call, Operation, Operations
from kakeya.bench.gpu_plan import GpuPlan
from kakeya.bench.gpu_results import Part, absence, kernel_row
from kakeya.bench.gpu_shapes import Shape
from kakeya.kernels.gpu import GpuKernels, load_gpu_kernels
from kakeya.types import KernelChoice

log = logging.getLogger(__name__)

# A device's cache holds some fifty MiB: a call does not find there what it read one replay earlier.
_COLD_BYTES = 256 * 2**20
# Torch's kernels loop in places: the repetitions of one end within about this time, if so few are enough.
_SECONDS = 0.5
_FEWEST_REPEATS = 3


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, by repetition."""

    seconds: Sequence[float]
    captured: bool


def measured_kernels(
    shape: Shape,
    attended_rows: Sequence[int],
    plan: GpuPlan,
    device: torch.device,
    rates: Mapping[str, float],
) -> dict[str, Any]:
    """A row for each operation, and what could not be measured of it; one that fails does not end the others.

    `rates` are the machine's: bytes a second of a copy, operations a second of a product.
    """
    rows, absent = [], []
    for operation in Operations(shape, plan, device).all(attended_rows):
        timings: dict[str, Timing] = {}
        for kernels in _kernels_of(device):
            outcome = _tried(operation, kernels, plan, device)
            if isinstance(outcome, Timing):
                timings[kernels.name] = outcome
            else:
                work = f"{shape.name}, {operation.name}, {operation.size}, {kernels.name}"
                absent.append(absence(Part.KERNELS, work, outcome))
        if timings:
            rows.append(_row(shape, operation, timings, rates))
    gc.collect()
    torch.cuda.empty_cache()  # nothing where there is no CUDA
    return {Part.KERNELS.value: rows, "absent": absent}


def _kernels_of(device: torch.device) -> list[GpuKernels]:
    """Those a device gets, and torch's beside them."""
    choices = (KernelChoice.AUTO, KernelChoice.TORCH)
    by_name = {kernels.name: kernels for kernels in (load_gpu_kernels(device, choice) for choice in choices)}
    return list(by_name.values())


def _row(
    shape: Shape, operation: Operation, timings: Mapping[str, Timing], rates: Mapping[str, float]
) -> dict[str, Any]:
    if operation.flops is None:
        floor = operation.moved_bytes / rates["copy_bytes_per_second"]
    else:
        floor = operation.flops / rates["product_flops_per_second"]
    return kernel_row(
        shape.name,
        operation.name,
        operation.size,
        moved_bytes=operation.moved_bytes,
        flops=operation.flops,
        floor_seconds=floor,
        seconds={name: timing.seconds for name, timing in timings.items()},
        captured={name for name, timing in timings.items() if timing.captured},
    )


def _tried(operation: Operation, kernels: GpuKernels, plan: GpuPlan, device: torch.device) -> Timing | str:
    """How long it took, or why nobody knows."""
    fewest, most = plan.kernel_calls
    calls = min(most, max(fewest, -(-_COLD_BYTES // operation.moved_bytes)))
    try:
        return _timed(operation.make(kernels, calls), calls, plan, device)
    except Exception as error:  # whatever it is, the other operations are worth having
        log.exception("%s failed with the %s kernels", operation.name, kernels.name)
        return f"{type(error).__name__}: {error}"


def _timed(call: Call, most_calls: int, plan: GpuPlan, device: torch.device) -> Timing | str:
    call(0)  # compiled, if it must be
    alone = _seconds_alone(call, device)
    if alone > plan.kernel_call_seconds:
        return f"one call takes {alone:.1f} s, too long to repeat"
    calls, repeats = _affordable(alone, most_calls, plan.repeats)

    def launch() -> None:
        for number in range(calls):
            call(number)

    replay = _captured(launch) if device.type == "cuda" else None
    seconds = timed(device, replay or launch, repeats)
    return Timing([each / calls for each in seconds], captured=replay is not None)


def _seconds_alone(call: Call, device: torch.device) -> float:
    """Of one call by the host's clock: enough to plan with."""
    _finish(device)
    began = time.perf_counter()
    call(0)
    _finish(device)
    return time.perf_counter() - began


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _affordable(seconds: float, most_calls: int, most_repeats: int) -> tuple[int, int]:
    """How many calls to replay together, and how often: calls are given up first."""
    affordable = int(_SECONDS / seconds)
    calls = max(1, min(most_calls, affordable // most_repeats))
    return calls, max(_FEWEST_REPEATS, min(most_repeats, affordable // calls))


def _captured(launch: Work) -> Work | None:
    """The work as a graph to replay; None if it waits for the device, which no graph can."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        waits = _waits(launch)
    torch.cuda.current_stream().wait_stream(stream)
    if waits:
        return None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        launch()
    return graph.replay


def _waits(launch: Work) -> bool:
    """Whether it waits for the device.

    Asked beforehand, because a capture that breaks off leaves an allocator that is of no use to others.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which tell that not every wait is found
        torch.cuda.set_sync_debug_mode("error")
        try:
            launch()
        except RuntimeError:
            return True  # or broken in another way, as will be seen
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return False

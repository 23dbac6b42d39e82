"""The device kernels by themselves: each operation's time beside what memory, or the matrix units, allow."""

import gc
import logging
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kakeya.bench.gpu.device import Work, timed
from kakeya.bench.gpu.operations import Call, Operation, Operations
from kakeya.bench.gpu.plan import GpuPlan
from kakeya.bench.gpu.results import Absence, Kernel, KernelTiming, Machine, Part
from kakeya.bench.gpu.shapes import Shape
from kakeya.bench.stats import Samples
from kakeya.kernels.gpu import GpuKernels, load_gpu_kernels
from kakeya.types import KernelChoice

log = logging.getLogger(__name__)

# A device's cache holds some fifty MiB: a call does not find there what it read one replay earlier.
_COLD_BYTES = 256 * 2**20
# Torch's kernels loop in places: the repetitions of one end within about this time, if so few are enough.
_SECONDS = 0.5
_FEWEST_REPEATS = 3
# One replay lasts this long, or as long as all calls do once: the clock has steps of half a microsecond.
_REPLAY_MS = 5


@dataclass(frozen=True)
class Timing:
    """Seconds of one call, by repetition."""

    seconds: Sequence[float]
    captured: bool


def measured_kernels(
    shape: Shape, attended_rows: Sequence[int], plan: GpuPlan, device: torch.device, machine: Machine
) -> tuple[list[Kernel], list[Absence]]:
    """A row for each operation, and what could not be measured; one that fails does not end the others."""
    rows, absent = [], []
    for operation in Operations(shape, plan, device).all(attended_rows):
        floor = _floor_seconds(operation, machine)
        timings: dict[str, KernelTiming] = {}
        for kernels in _kernels_of(device):
            outcome = _tried(operation, kernels, plan, device)
            if isinstance(outcome, Timing):
                taken = Samples.of(outcome.seconds)
                timings[kernels.name] = KernelTiming.of(taken, floor, captured=outcome.captured)
            else:
                work = f"{shape.name}, {operation.name}, {operation.size}, {kernels.name}"
                absent.append(Absence(Part.KERNELS, work, outcome))
        if timings:
            rows.append(
                Kernel(
                    shape.name,
                    operation.name,
                    operation.size,
                    operation.moved_bytes,
                    operation.flops,
                    floor,
                    timings,
                )
            )
    gc.collect()
    torch.cuda.empty_cache()  # nothing where there is no CUDA
    return rows, absent


def _floor_seconds(operation: Operation, machine: Machine) -> float:
    if operation.flops is None:
        return operation.moved_bytes / machine.rate("copy_bytes_per_second")
    return operation.flops / machine.rate("product_flops_per_second")


def _kernels_of(device: torch.device) -> list[GpuKernels]:
    """Those a device gets, and torch's beside them."""
    choices = (KernelChoice.AUTO, KernelChoice.TORCH)
    by_name = {kernels.name: kernels for kernels in (load_gpu_kernels(device, choice) for choice in choices)}
    return list(by_name.values())


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

    captured = device.type == "cuda" and not _waits(launch)
    seconds = _replayed(launch) if captured else timed(device, launch, repeats)
    return Timing([each / calls for each in seconds], captured)


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
    """How many calls to run together, and how often: calls are given up first."""
    affordable = int(_SECONDS / seconds)
    calls = max(1, min(most_calls, affordable // most_repeats))
    return calls, max(_FEWEST_REPEATS, min(most_repeats, affordable // calls))


def _replayed(launch: Work) -> list[float]:
    """Seconds of the launch as a captured graph."""
    from triton.testing import do_bench_cudagraph  # which a machine without a device may lack

    milliseconds: list[float] = do_bench_cudagraph(launch, rep=_REPLAY_MS, return_mode="all")
    return [each / 1000 for each in milliseconds]


def _waits(launch: Work) -> bool:
    """Whether it waits for the device, which no graph can.

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

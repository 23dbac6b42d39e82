"""The GPU kernels by themselves: each operation's time, and its floor at the copy rate or the matmul rate."""

import gc
import logging
import time
from collections.abc import Iterator, Sequence

import torch

from kakeya.bench.gpu.device import timed
from kakeya.bench.gpu.operations import Call, Operation, Operations
from kakeya.bench.gpu.plan import GpuPlan
from kakeya.bench.gpu.results import Absence, Kernel, KernelTiming, Machine, Part
from kakeya.bench.gpu.shapes import Shape
from kakeya.bench.stats import Samples, ratio
from kakeya.kernels.gpu import GpuKernels, load_gpu_kernels
from kakeya.types import KernelChoice

log = logging.getLogger(__name__)

# A device's L2 cache holds some fifty MiB: a call does not find there what it read one replay earlier.
_COLD_BYTES = 256 * 2**20
# Torch's kernels loop in places: all repetitions of a slow one take about this long.
_SECONDS = 0.5
# One replay lasts this long, or as long as all calls do once: the clock has steps of half a microsecond.
_REPLAY_MS = 5


def kernel_rows(
    shape: Shape, attended_rows: Sequence[int], plan: GpuPlan, device: torch.device, machine: Machine
) -> Iterator[Kernel | Absence]:
    """A row for each operation, and what could not be measured. One that fails does not end the others."""
    choices = [load_gpu_kernels(device, choice) for choice in (KernelChoice.AUTO, KernelChoice.TORCH)]
    for operation in Operations(shape, plan, device).all(attended_rows):
        name, size, moved, flops = operation.name, operation.size, operation.moved_bytes, operation.flops
        if flops is None:
            floor = moved / machine.rate("copy_bytes_per_second")
        else:
            floor = flops / machine.rate("product_flops_per_second")
        timings: dict[str, KernelTiming] = {}
        for kernels in {each.name: each for each in choices}.values():
            try:
                seconds = Samples.of(_seconds(operation, kernels, plan, device))
            except Exception as error:  # whatever it is, the other operations are worth having
                log.exception("%s failed with the %s kernels", name, kernels.name)
                work, why = (
                    f"{shape.name}, {name}, {size}, {kernels.name}",
                    f"{type(error).__name__}: {error}",
                )
                yield Absence(Part.KERNELS, work, why)
            else:
                share = ratio(floor, seconds.median)
                timings[kernels.name] = KernelTiming(seconds, share, captured=device.type == "cuda")
        if timings:
            yield Kernel(shape.name, name, size, moved, flops, floor, timings)
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without CUDA


def _seconds(operation: Operation, kernels: GpuKernels, plan: GpuPlan, device: torch.device) -> list[float]:
    """Of one call, by repetition. On a device, several calls are captured in one graph and replayed."""
    fewest, most = plan.kernel_calls
    calls = min(most, max(fewest, -(-_COLD_BYTES // operation.moved_bytes)))
    call = operation.make(kernels, calls)
    call(0)  # compiles it
    alone = _seconds_alone(call, device)
    if alone > plan.kernel_call_seconds:
        raise TimeoutError(f"one call takes {alone:.1f} s, too long to repeat")
    calls = max(1, min(calls, int(_SECONDS / alone / plan.repeats)))

    def launch() -> None:
        for number in range(calls):
            call(number)

    if device.type == "cuda":
        from triton.testing import do_bench_cudagraph  # not installed everywhere

        seconds = [ms / 1000 for ms in do_bench_cudagraph(launch, rep=_REPLAY_MS, return_mode="all")]
    else:
        seconds = timed(device, launch, plan.repeats)
    return [each / calls for each in seconds]


def _seconds_alone(call: Call, device: torch.device) -> float:
    """Of one call by the host's clock: enough to plan with."""
    finish = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
    finish(device)
    began = time.perf_counter()
    call(0)
    finish(device)
    return time.perf_counter() - began

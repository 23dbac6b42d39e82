"""`kakeya bench gpu`: steps, history, prompts, numerics and the whole runtime, on one device in one run."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from kakeya.bench.gpu_machine import chosen_device, device_facts
from kakeya.bench.gpu_parts import Job, jobs
from kakeya.bench.gpu_plan import FULL, QUICK, GpuPlan
from kakeya.bench.gpu_results import Part, absence, empty_results, gpu_gates
from kakeya.bench.gpu_rig import Workshop
from kakeya.bench.machine import machine_facts, public_name
from kakeya.bench.report import Report, now
from kakeya.bench.work import Show, Work
from kakeya.errors import ConfigError

log = logging.getLogger(__name__)

Checkpoint = Callable[[Report], object]


@dataclass(frozen=True)
class GpuBench:
    """Where to measure, which parts, and for how long. `model` has real weights for the part parity.

    Raises ConfigError.
    """

    device: str = "cuda"
    parts: frozenset[Part] = frozenset(Part)
    model: str | None = None
    seconds: float = 480.0
    quick: bool = False

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"seconds must be above 0, got {self.seconds:g}")
        if self.device != "cuda" and not self.quick:
            raise ConfigError(f"on the device {self.device} only --quick runs: its figures say nothing")
        chosen_device(self.device)

    @property
    def plan(self) -> GpuPlan:
        return QUICK if self.quick else FULL

    @property
    def jobs(self) -> list[Job]:
        """Those asked for. The machine is always among them."""
        asked = self.parts | {Part.MACHINE}
        return [job for job in jobs(self.plan, self.model) if job.part in asked]


def run(bench: GpuBench, show: Show, checkpoint: Checkpoint) -> Report:
    """Measure the parts and return the finished report.

    What fails, or would take longer than what is left of the time, is reported as absent with the reason, and
    the run goes on. `checkpoint` gets a partial report after each job, judged as far as it goes.
    """
    device = chosen_device(bench.device)
    report = Report("gpu", _settings(bench), machine_facts() | {"device": device_facts(device)})
    results = empty_results()
    results["absent"] += _never(bench)
    began = time.perf_counter()
    work = Work(sum(job.seconds for job in bench.jobs), show)
    with Workshop(device, bench.plan) as shop:
        for job in bench.jobs:
            work.begin(f"{job.part}, {job.work}")
            left = bench.seconds - (time.perf_counter() - began)
            results = _with(results, _done(job, shop, results, left)) | {"memory": shop.memory()}
            work.advance(job.seconds)
            report = replace(report, results=results, gates=gpu_gates(results))
            checkpoint(report)
    return replace(report, finished_at=now())


def _never(bench: GpuBench) -> list[dict[str, str]]:
    """What this run does not even try."""
    unasked = [
        absence(part, "all", "not asked for") for part in Part if part not in bench.parts | {Part.MACHINE}
    ]
    if Part.PARITY in bench.parts and bench.model is None:
        unasked.append(absence(Part.PARITY, "all", "no model with real weights was given (--model)"))
    return unasked


def _done(job: Job, shop: Workshop, results: Mapping[str, Any], left: float) -> dict[str, Any]:
    """What the job found, or why it found nothing."""
    if left < job.seconds and not _is_tiny(shop):
        why = f"takes about {job.seconds:.0f} s, and {max(0.0, left):.0f} s were left"
        return {"absent": [absence(job.part, job.work, why)]}
    began = time.perf_counter()
    try:
        found = job.measure(shop, dict(results))
    except Exception as error:  # whatever it is, the other parts are worth having
        log.exception("the part %s failed", job.part)
        shop.clear()
        return {"absent": [absence(job.part, job.work, f"{type(error).__name__}: {error}")]}
    if job.part not in (Part.KERNELS, Part.TRANSFORMERS):  # which take memory of their own
        shop.note_memory()
    return {**found, "seconds": {f"{job.part}, {job.work}": round(time.perf_counter() - began, 1)}}


def _is_tiny(shop: Workshop) -> bool:
    """Tiny shapes take no time worth counting."""
    return shop.plan is QUICK


def _with(results: dict[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Rows go behind those that are there; facts beside."""
    added = {
        name: results[name] + value if isinstance(value, list) else results[name] | value
        for name, value in found.items()
    }
    return results | added


def _settings(bench: GpuBench) -> dict[str, Any]:
    return {
        "device": bench.device,
        "parts": sorted(bench.parts),
        "model": None if bench.model is None else public_name(bench.model),
        "weights": "random, of the named shapes; parity alone reads the model",
        "seconds": bench.seconds,
        "quick": bench.quick,
        "plan": asdict(bench.plan),
    }

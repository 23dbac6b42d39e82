"""The parts of `bench gpu` as jobs: what each measures, which shapes it needs open, and how long it takes."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from kakeya.bench.benchmark import Run
from kakeya.bench.gpu import steps, transformers_peer
from kakeya.bench.gpu.benchmark import GpuBench
from kakeya.bench.gpu.checks import identity_rows, parity_rows
from kakeya.bench.gpu.device import chosen_device, device_facts, measured_machine, peak_bytes, reset_peak
from kakeya.bench.gpu.kernels import measured_kernels
from kakeya.bench.gpu.plan import QUICK, GpuPlan
from kakeya.bench.gpu.results import (
    GENERATE,
    GENERATE_BATCH,
    GREEDY,
    OURS,
    SEEDED,
    Absence,
    Exact,
    GpuResults,
    History,
    Machine,
    Part,
    Peer,
    Prompt,
    RuntimeRow,
    Step,
    counted,
)
from kakeya.bench.gpu.rig import Rig, RigKey, Workshop
from kakeya.bench.gpu.runtime import Sampling, Tally, generate_all, greedy, sessions
from kakeya.bench.gpu.shapes import SHAPES
from kakeya.bench.stats import Samples, known, ratio
from kakeya.errors import PeerFailed
from kakeya.types import Numerics, SamplingParams

log = logging.getLogger(__name__)

# Gets the open shapes and the machine, as far as it was measured; gives what it found.
Measure = Callable[[Workshop, Machine], GpuResults]

_SAMPLINGS: dict[str, Sampling] = {
    GREEDY: greedy,
    SEEDED: lambda number: SamplingParams(temperature=0.8, top_p=0.95, seed=number),
}


@dataclass(frozen=True)
class Job:
    """`seconds` is what it takes on an H200, opening its shapes and compiling their kernels included."""

    part: Part
    work: str
    seconds: float
    measure: Measure

    @property
    def label(self) -> str:
        return f"{self.part}, {self.work}"


def jobs(plan: GpuPlan, model: str | None) -> Iterator[Job]:
    """All there are, ordered so that a shape is opened once, foreign code behind ours that gates ask for.
    Without a model there is no parity."""
    large = RigKey(plan.large, plan.sessions)
    exact = RigKey(plan.large, plan.exact_rows, Numerics.EXACT)
    small = RigKey(plan.small, plan.sessions)
    middle = RigKey(plan.middle, max(plan.middle_rows))
    yield Job(Part.MACHINE, "rates", 1, measure_machine)
    if model is not None:
        yield Job(Part.PARITY, "greedy tokens", 26, partial(measure_parity, model))
    yield Job(Part.STEPS, plan.large, 17, partial(measure_steps, large, plan.large_rows))
    yield Job(Part.HISTORY, plan.large, 2, partial(measure_history, large, plan.history_rows_large))
    yield Job(Part.PROMPT, plan.large, 2, partial(measure_prompt, large))
    yield Job(Part.RUNTIME, plan.large, 23, partial(measure_runtime, large, plan.tokens_large, (GREEDY,)))
    yield Job(Part.EXACT, plan.large, 5, partial(measure_exact, large, exact))
    yield Job(Part.STEPS, plan.middle, 17, partial(measure_steps, middle, plan.middle_rows))
    yield Job(Part.STEPS, plan.small, 14, partial(measure_steps, small, plan.small_rows))
    yield Job(Part.HISTORY, plan.small, 1, partial(measure_history, small, plan.history_rows_small))
    yield Job(
        Part.RUNTIME, plan.small, 38, partial(measure_runtime, small, plan.tokens_small, (GREEDY, SEEDED))
    )
    # One for each contender, so that what was measured stays when another breaks; the one that may take its
    # whole limit comes last.
    for count in plan.peer_sessions:
        yield _peer_job(OURS, count, 10, partial(measure_ours, small, count))
        yield _peer_job(GENERATE, count, 40, partial(measure_generate, plan.small, count))
    most, limit = max(plan.peer_sessions), transformers_peer.LIMIT_SECONDS + 5
    yield _peer_job(GENERATE_BATCH, most, limit, partial(measure_generate_batch, plan.small, most))
    # Last, since no gate asks for them: if time is short, these are missed least.
    yield Job(Part.KERNELS, plan.large, 15, partial(measure_kernels, plan.large, plan.large_rows))
    yield Job(Part.KERNELS, plan.small, 15, partial(measure_kernels, plan.small, plan.small_rows))


def _peer_job(who: str, count: int, seconds: float, measure: Measure) -> Job:
    return Job(Part.TRANSFORMERS, f"{who}, {counted(count)}", seconds, measure)


def measure(bench: GpuBench, run: Run[GpuResults]) -> GpuResults:
    """Do the jobs that were asked for, one after the other, with a partial report after each."""
    device = chosen_device(bench.device)
    run.machine["device"] = {name: fact for name, fact in vars(device_facts(device)).items() if fact}
    todo = [job for job in jobs(bench.plan, bench.model) if job.part in bench.parts]
    results = GpuResults(absent=list(_not_tried(bench)))
    began = time.perf_counter()
    work = run.work(sum(job.seconds for job in todo))
    with Workshop(device, bench.plan) as shop:
        for job in todo:
            work.begin(job.label)
            left = bench.seconds - (time.perf_counter() - began)
            found = _done(job, shop, results.machine, left)
            results = replace(results.joined(found), memory=shop.memory())
            work.advance(job.seconds)
            run.checkpoint(results)
    return results


def _not_tried(bench: GpuBench) -> Iterator[Absence]:
    for part in Part:
        if part not in bench.parts:
            yield Absence(part, "all", "not asked for")
    if Part.PARITY in bench.parts and bench.model is None:
        yield Absence(Part.PARITY, "all", "no model with real weights was given (--model)")


def _done(job: Job, shop: Workshop, machine: Machine, left: float) -> GpuResults:
    """What the job found, or why it found nothing."""
    if left < job.seconds and not _is_tiny(shop.plan):
        why = f"takes about {job.seconds:.0f} s, and {max(0.0, left):.0f} s were left"
        return GpuResults(absent=[Absence(job.part, job.work, why)])
    began = time.perf_counter()
    try:
        found = job.measure(shop, machine)
    except Exception as error:  # whatever it is, the other parts are worth having
        log.exception("the part %s failed", job.part)
        shop.clear()
        return GpuResults(absent=[Absence(job.part, job.work, f"{type(error).__name__}: {error}")])
    if job.part not in (Part.KERNELS, Part.TRANSFORMERS):  # which take memory of their own
        shop.note_memory()
    return replace(found, seconds={job.label: round(time.perf_counter() - began, 1)})


def _is_tiny(plan: GpuPlan) -> bool:
    """Tiny shapes take no time worth counting."""
    return plan is QUICK


def measure_machine(shop: Workshop, machine: Machine) -> GpuResults:
    return GpuResults(machine=measured_machine(shop.device, shop.plan))


def measure_steps(key: RigKey, rows: tuple[int, ...], shop: Workshop, machine: Machine) -> GpuResults:
    """Bare steps past the wrap, beside what memory allows."""
    rig, plan = shop.rig(key), shop.plan
    bandwidth, kernels = machine.rate("copy_bytes_per_second"), rig.runtime.describe().kernels
    found = []
    for count in rows:
        seconds = Samples.of(steps.step_seconds(rig.backend, count, plan.position, plan.repeats))
        floor = rig.shape.floor_seconds(count, plan.past_the_wrap, bandwidth)
        found.append(Step(key.shape, count, kernels, seconds, floor))
    return GpuResults(steps=found)


def measure_history(key: RigKey, rows: int, shop: Workshop, machine: Machine) -> GpuResults:
    plan = shop.plan
    near, far = plan.near, plan.far
    seconds = steps.history_seconds(shop.rig(key).backend, rows, (near, far), plan.repeats)
    row = History(key.shape, rows, near, far, Samples.of(seconds[near]), Samples.of(seconds[far]))
    return GpuResults(history=[row])


def measure_prompt(key: RigKey, shop: Workshop, machine: Machine) -> GpuResults:
    rig, plan = shop.rig(key), shop.plan
    seconds = steps.prompt_seconds(rig.backend, plan.prompt_rows, plan.position, plan.repeats)
    flops, rate = rig.shape.prompt_flops(plan.prompt_rows), machine.rate("product_flops_per_second")
    return GpuResults(prompt=[Prompt.of(key.shape, plan.prompt_rows, Samples.of(seconds), flops, rate)])


def measure_exact(fast_key: RigKey, exact_key: RigKey, shop: Workshop, machine: Machine) -> GpuResults:
    """Both numerics open at once, so that their steps can take turns."""
    plan = shop.plan
    fast, exact = shop.rigs([fast_key, exact_key])
    seconds = steps.seconds_of_both(fast.backend, exact.backend, plan.exact_rows, plan.position, plan.repeats)
    row = Exact(exact_key.shape, plan.exact_rows, *map(Samples.of, seconds))
    return GpuResults(exact=[row], identity=identity_rows(exact, plan))


def measure_runtime(
    key: RigKey, tokens: int, samplings: tuple[str, ...], shop: Workshop, machine: Machine
) -> GpuResults:
    """All sessions at once, their windows full; bare steps before and after."""
    rig, plan = shop.rig(key), shop.plan
    before = _bare(rig, plan)
    with sessions(rig.runtime, rig.shape.histories(plan.sessions, plan.filled)) as session_ids:
        filling = generate_all(rig.runtime, session_ids, 1)
        taken = {each: _repeated(rig, session_ids, tokens, _SAMPLINGS[each], shop) for each in samplings}
    bare = ratio(plan.sessions, Samples.of([*before, *_bare(rig, plan)]).median)
    rows = [
        RuntimeRow(
            key.shape,
            plan.sessions,
            sampling,
            tokens_per_second=Samples.of(known(tally.speed for tally in tallies)),
            whole_tokens_per_second=Samples.of(tally.whole_speed for tally in tallies),
            bare_tokens_per_second=bare,
            prompt_tokens_per_second=plan.sessions * plan.filled / filling.seconds,
            peak_bytes=tuple(peaks),
        )
        for sampling, (tallies, peaks) in taken.items()
    ]
    return GpuResults(runtime=rows)


def _bare(rig: Rig, plan: GpuPlan) -> list[float]:
    return steps.step_seconds(rig.backend, plan.sessions, plan.position, plan.repeats)


def _repeated(
    rig: Rig, session_ids: list[str], tokens: int, sampling: Sampling, shop: Workshop
) -> tuple[list[Tally], list[int]]:
    """The repetitions, and the peak of device memory after each."""
    tallies, peaks = [], []
    reset_peak(shop.device)
    for _ in range(shop.plan.runtime_repeats):
        tallies.append(generate_all(rig.runtime, session_ids, tokens, sampling))
        peaks += peak_bytes(shop.device)
    return tallies, peaks


def measure_kernels(shape: str, rows: tuple[int, ...], shop: Workshop, machine: Machine) -> GpuResults:
    """Without a runtime: a capture breaks when another thread calls CUDA, so no engine stays open."""
    shop.clear()
    kernels, absent = measured_kernels(SHAPES[shape], rows, shop.plan, shop.device, machine)
    return GpuResults(kernels=kernels, absent=absent)


def measure_ours(key: RigKey, count: int, shop: Workshop, machine: Machine) -> GpuResults:
    speeds = transformers_peer.our_speeds(shop.rig(key), shop.plan, count)
    return GpuResults(transformers=[Peer(key.shape, count, OURS, Samples.of(speeds))])


def measure_generate(shape: str, count: int, shop: Workshop, machine: Machine) -> GpuResults:
    speeds = transformers_peer.generate_speeds(SHAPES[shape], shop.plan, count, shop.device)
    return GpuResults(transformers=[Peer(shape, count, GENERATE, Samples.of(speeds))])


def measure_generate_batch(shape: str, count: int, shop: Workshop, machine: Machine) -> GpuResults:
    """It gets the device to itself: its cache takes most of what is free."""
    work = f"{GENERATE_BATCH}, {counted(count)}"
    if shop.device.type != "cuda":
        return GpuResults(absent=[Absence(Part.TRANSFORMERS, work, "it needs a CUDA device")])
    shop.clear()
    try:
        batch = transformers_peer.measured_batch(shape, shop.plan, count, shop.device)
    except PeerFailed as error:
        return GpuResults(absent=[Absence(Part.TRANSFORMERS, work, str(error))])
    absent = [
        Absence(Part.TRANSFORMERS, f"{work}, attention {attention}", why)
        for attention, why in batch.failed.items()
    ]
    row = Peer(shape, count, batch.method, Samples((batch.speed,)))
    return GpuResults(transformers=[row], absent=absent)


def measure_parity(model: str, shop: Workshop, machine: Machine) -> GpuResults:
    shop.clear()
    return GpuResults(parity=parity_rows(model, shop.plan, shop.device))

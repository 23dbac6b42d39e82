"""The parts of `bench gpu` as jobs: what each measures, which shapes it needs open, and how long it takes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from kakeya.bench import gpu_batch_peer, gpu_peers, gpu_steps
from kakeya.bench.gpu_checks import identity_rows, parity_rows
from kakeya.bench.gpu_kernels import measured_kernels
from kakeya.bench.gpu_machine import PeakMemory, device_facts, measured_rates
from kakeya.bench.gpu_plan import GpuPlan
from kakeya.bench.gpu_results import (
    GENERATE,
    GENERATE_BATCH,
    GREEDY,
    OURS,
    SEEDED,
    Part,
    absence,
    counted,
    exact_row,
    history_row,
    peer_row,
    prompt_row,
    runtime_row,
    step_row,
)
from kakeya.bench.gpu_rig import Rig, RigKey, Workshop
from kakeya.bench.gpu_runtime import Sampling, Tally, generate_all, greedy, histories, sessions
from kakeya.bench.gpu_shapes import SHAPES
from kakeya.errors import PeerFailed
from kakeya.types import Numerics, SamplingParams

# What a job adds to the results: rows by the name of their table.
Found = dict[str, Any]
Measure = Callable[[Workshop, dict[str, Any]], Found]


@dataclass(frozen=True)
class Job:
    """`measure` gets the workshop and all that was found so far.

    `seconds` is what it takes on an H200, opening its shapes and compiling their kernels included.
    """

    part: Part
    work: str
    seconds: float
    measure: Measure


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
    yield from _peer_jobs(plan, small)
    # Last, since no gate asks for them: if time is short, these are missed least.
    yield Job(Part.KERNELS, plan.large, 15, partial(measure_kernels, plan.large, plan.large_rows))
    yield Job(Part.KERNELS, plan.small, 15, partial(measure_kernels, plan.small, plan.small_rows))


def _peer_jobs(plan: GpuPlan, key: RigKey) -> Iterator[Job]:
    """One for each contender, so that what was measured stays when another breaks; the one that may
    take its whole limit comes last."""

    def job(who: str, count: int, seconds: float, measure: Measure) -> Job:
        return Job(Part.TRANSFORMERS, f"{who}, {counted(count)}", seconds, measure)

    for count in plan.peer_sessions:
        yield job(OURS, count, 10, partial(measure_ours, key, count))
        yield job(GENERATE, count, 40, partial(measure_generate, key.shape, count))
    most = max(plan.peer_sessions)
    limit = gpu_batch_peer.LIMIT_SECONDS + 5
    yield job(GENERATE_BATCH, most, limit, partial(measure_generate_batch, key.shape, most))


def measure_machine(shop: Workshop, found: dict[str, Any]) -> Found:
    return {"machine": device_facts(shop.device) | measured_rates(shop.device, shop.plan)}


def _rate(found: dict[str, Any], name: str) -> float:
    """A measured rate. Raises RuntimeError where there is none."""
    if name not in found["machine"]:
        raise RuntimeError("the machine's rates could not be measured, so there is nothing to hold this to")
    return float(found["machine"][name])


def measure_steps(key: RigKey, rows: tuple[int, ...], shop: Workshop, found: dict[str, Any]) -> Found:
    """Bare steps past the wrap, beside what memory allows."""
    [rig], plan = shop.rigs([key]), shop.plan
    bandwidth = _rate(found, "copy_bytes_per_second")
    return {
        "steps": [
            step_row(
                key.shape,
                count,
                rig.runtime.describe().kernels,
                gpu_steps.step_seconds(rig.backend, count, plan.position, plan.repeats),
                rig.shape.floor_seconds(count, plan.past_the_wrap, bandwidth),
            )
            for count in rows
        ]
    }


def measure_history(key: RigKey, rows: int, shop: Workshop, found: dict[str, Any]) -> Found:
    [rig], plan = shop.rigs([key]), shop.plan
    positions = (plan.near, plan.far)
    seconds = gpu_steps.history_seconds(rig.backend, rows, positions, plan.repeats)
    return {"history": [history_row(key.shape, rows, seconds)]}


def measure_prompt(key: RigKey, shop: Workshop, found: dict[str, Any]) -> Found:
    [rig], plan = shop.rigs([key]), shop.plan
    seconds = gpu_steps.prompt_seconds(rig.backend, plan.prompt_rows, plan.position, plan.repeats)
    flops, rate = rig.shape.prompt_flops(plan.prompt_rows), _rate(found, "product_flops_per_second")
    return {"prompt": [prompt_row(key.shape, plan.prompt_rows, seconds, flops, rate)]}


def measure_exact(fast_key: RigKey, exact_key: RigKey, shop: Workshop, found: dict[str, Any]) -> Found:
    """Both numerics open at once, so that their steps can take turns."""
    plan = shop.plan
    fast, exact = shop.rigs([fast_key, exact_key])
    seconds = gpu_steps.seconds_of_both(
        fast.backend, exact.backend, plan.exact_rows, plan.position, plan.repeats
    )
    return {
        "exact": [exact_row(exact_key.shape, plan.exact_rows, *seconds)],
        "identity": identity_rows(exact, plan),
    }


def measure_runtime(
    key: RigKey, tokens: int, samplings: tuple[str, ...], shop: Workshop, found: dict[str, Any]
) -> Found:
    """All sessions at once, their windows full; bare steps before and after."""
    [rig], plan = shop.rigs([key]), shop.plan
    before = _bare(rig, plan)
    with sessions(rig.runtime, histories(rig.shape, plan.sessions, plan.filled)) as session_ids:
        filling = generate_all(rig.runtime, session_ids, 1)
        taken = {
            sampling: _repeated(rig, session_ids, tokens, _SAMPLINGS[sampling], shop)
            for sampling in samplings
        }
    after = _bare(rig, plan)
    rows = [
        runtime_row(
            key.shape,
            plan.sessions,
            sampling,
            speeds=[tally.speed for tally in tallies],
            whole_speeds=[tally.tokens / tally.seconds for tally in tallies],
            step_seconds=[*before, *after],
            prompt_tokens_per_second=plan.sessions * plan.filled / filling.seconds,
            peak_bytes=peaks,
        )
        for sampling, (tallies, peaks) in taken.items()
    ]
    return {"runtime": rows}


_SAMPLINGS: dict[str, Sampling] = {
    GREEDY: greedy,
    SEEDED: lambda number: SamplingParams(temperature=0.8, top_p=0.95, seed=number),
}


def _bare(rig: Rig, plan: GpuPlan) -> list[float]:
    return gpu_steps.step_seconds(rig.backend, plan.sessions, plan.position, plan.repeats)


def _repeated(
    rig: Rig, session_ids: list[str], tokens: int, sampling: Sampling, shop: Workshop
) -> tuple[list[Tally], list[int]]:
    """The repetitions, and the peak of device memory after each."""
    tallies, peaks = [], []
    memory = PeakMemory(shop.device)
    for _ in range(shop.plan.runtime_repeats):
        tallies.append(generate_all(rig.runtime, session_ids, tokens, sampling))
        peaks += memory.peak_bytes()
    return tallies, peaks


def measure_kernels(shape: str, rows: tuple[int, ...], shop: Workshop, found: dict[str, Any]) -> Found:
    """Without a runtime: what is open may stay open, its engine rests."""
    rates = {name: _rate(found, name) for name in ("copy_bytes_per_second", "product_flops_per_second")}
    return measured_kernels(SHAPES[shape], rows, shop.plan, shop.device, rates)


def measure_ours(key: RigKey, count: int, shop: Workshop, found: dict[str, Any]) -> Found:
    [rig] = shop.rigs([key])
    return {"transformers": [peer_row(key.shape, count, OURS, gpu_peers.our_speeds(rig, shop.plan, count))]}


def measure_generate(shape: str, count: int, shop: Workshop, found: dict[str, Any]) -> Found:
    speeds = gpu_peers.generate_speeds(SHAPES[shape], shop.plan, count, shop.device)
    return {"transformers": [peer_row(shape, count, GENERATE, speeds)]}


def measure_generate_batch(shape: str, count: int, shop: Workshop, found: dict[str, Any]) -> Found:
    """It gets the device to itself: its cache takes most of what is free."""
    work = f"{GENERATE_BATCH}, {counted(count)}"
    if shop.device.type != "cuda":
        return {"absent": [absence(Part.TRANSFORMERS, work, "it needs a CUDA device")]}
    shop.clear()
    try:
        batch = gpu_batch_peer.measured(shape, shop.plan, count, shop.device)
    except PeerFailed as error:
        return {"absent": [absence(Part.TRANSFORMERS, work, str(error))]}
    return {
        "transformers": [peer_row(shape, count, batch.method, [batch.speed])],
        "absent": [
            absence(Part.TRANSFORMERS, f"{work}, attention {attention}", why)
            for attention, why in batch.failed.items()
        ],
    }


def measure_parity(model: str, shop: Workshop, found: dict[str, Any]) -> Found:
    shop.clear()
    return {"parity": parity_rows(model, shop.plan, shop.device)}

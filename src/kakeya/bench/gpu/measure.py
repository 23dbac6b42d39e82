"""The jobs of `bench gpu`: what each part measures, with which models, and how long it takes."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import torch

from kakeya.bench.benchmark import Run
from kakeya.bench.gpu import results as row, transformers_peer
from kakeya.bench.gpu.benchmark import GpuBench
from kakeya.bench.gpu.checks import identity_rows, parity_rows
from kakeya.bench.gpu.device import device_facts, measured_machine, open_device
from kakeya.bench.gpu.kernels import kernel_rows
from kakeya.bench.gpu.models import OpenModel, OpenModels, Setup, seconds_in_turns
from kakeya.bench.gpu.plan import QUICK
from kakeya.bench.gpu.results import GREEDY, SEEDED, Absence, GpuResults, Part, Row
from kakeya.bench.gpu.runtime import Tally, generate_all, sessions
from kakeya.bench.gpu.shapes import SHAPES
from kakeya.bench.stats import Samples, known, ratio
from kakeya.types import Numerics, SamplingParams

log = logging.getLogger(__name__)

Rows = Iterator[Row]

_SAMPLINGS = {GREEDY: SamplingParams(), SEEDED: SamplingParams(temperature=0.8, top_p=0.95)}


@dataclass(frozen=True)
class Job:
    """`seconds` is what it takes on an H200, with opening its models and compiling their kernels."""

    part: Part
    work: str
    seconds: float
    measure: Callable[[], Rows]

    @property
    def label(self) -> str:
        return f"{self.part}, {self.work}"


class Measurement:
    """Does the jobs of a benchmark. A job that fails, or has no time left, is noted as absent."""

    def __init__(self, bench: GpuBench, device: torch.device, models: OpenModels) -> None:
        self._bench, self._plan, self._device, self._models = bench, bench.plan, device, models
        self.results = GpuResults(absent=list(_not_asked(bench)))

    def jobs(self) -> list[Job]:
        """In an order that opens each model once. Foreign code comes behind ours."""
        plan, model = self._plan, self._bench.model
        large, small = Setup(plan.large, plan.sessions), Setup(plan.small, plan.sessions)
        exact = Setup(plan.large, plan.exact_rows, Numerics.EXACT)
        middle = Setup(plan.middle, max(plan.middle_rows))
        both = [GREEDY, SEEDED]
        jobs = [
            Job(Part.MACHINE, "rates", 1, self._machine),
            Job(Part.PARITY, "greedy tokens", 26, self._parity),
            Job(Part.STEPS, plan.large, 17, partial(self._steps, large, plan.large_rows)),
            Job(Part.HISTORY, plan.large, 2, partial(self._history, large, plan.history_rows_large)),
            Job(Part.PROMPT, plan.large, 2, partial(self._prompt, large)),
            Job(Part.RUNTIME, plan.large, 23, partial(self._runtime, large, plan.tokens_large, [GREEDY])),
            Job(Part.EXACT, plan.large, 5, partial(self._exact, large, exact)),
            Job(Part.STEPS, plan.middle, 17, partial(self._steps, middle, plan.middle_rows)),
            Job(Part.STEPS, plan.small, 14, partial(self._steps, small, plan.small_rows)),
            Job(Part.HISTORY, plan.small, 1, partial(self._history, small, plan.history_rows_small)),
            Job(Part.RUNTIME, plan.small, 38, partial(self._runtime, small, plan.tokens_small, both)),
            *self._peer_jobs(small),
            # Last, because no gate needs them.
            Job(Part.KERNELS, plan.large, 15, partial(self._kernels, plan.large, plan.large_rows)),
            Job(Part.KERNELS, plan.small, 15, partial(self._kernels, plan.small, plan.small_rows)),
        ]
        parts = self._bench.parts - ({Part.PARITY} if model is None else set())
        return [job for job in jobs if job.part in parts]

    def _peer_jobs(self, setup: Setup) -> Iterator[Job]:
        """One for each method, so that what was measured stays when another breaks. The one that may take its
        whole limit comes last."""
        for count in self._plan.peer_sessions:
            sessions = row.counted(count)
            ours, theirs = partial(self._ours, setup, count), partial(self._generate, setup.shape, count)
            yield Job(Part.TRANSFORMERS, f"{row.OURS}, {sessions}", 10, ours)
            yield Job(Part.TRANSFORMERS, f"{row.GENERATE}, {sessions}", 40, theirs)
        most, limit = max(self._plan.peer_sessions), transformers_peer.LIMIT_SECONDS + 5
        work = f"{row.GENERATE_BATCH}, {row.counted(most)}"
        batch = partial(self._generate_batch, setup.shape, most, work)
        yield Job(Part.TRANSFORMERS, work, limit, batch)

    def do(self, job: Job, seconds_left: float) -> None:
        """Do it, or note why it was not done."""
        began = time.perf_counter()
        if seconds_left < job.seconds and self._plan is not QUICK:  # tiny shapes take no time worth counting
            why = f"takes about {job.seconds:.0f} s, and {max(0.0, seconds_left):.0f} s were left"
            self.results.add(job.part, [Absence(job.part, job.work, why)])
            return
        try:
            self.results.add(job.part, list(job.measure()))
        except Exception as error:  # whatever it is, the other parts are worth having
            log.exception("the part %s failed", job.part)
            self._models.close()
            why = f"{type(error).__name__}: {error}"
            self.results.add(job.part, [Absence(job.part, job.work, why)])
        else:
            if job.part not in (Part.KERNELS, Part.TRANSFORMERS):  # which use memory of their own
                self._models.note_steps()
            self.results.seconds[job.label] = round(time.perf_counter() - began, 1)
        self.results = replace(self.results, memory=list(self._models.memory.values()))

    def _machine(self) -> Rows:
        self.results = replace(self.results, machine=measured_machine(self._device, self._plan))
        yield from ()

    def _parity(self) -> Rows:
        self._models.close()
        yield from parity_rows(str(self._bench.model), self._plan, self._device)

    def _steps(self, setup: Setup, rows: Sequence[int]) -> Rows:
        [model], plan = self._models.get(setup), self._plan
        bandwidth = self.results.machine.rate("copy_bytes_per_second")
        kernels = model.runtime.describe().kernels
        for count in rows:
            seconds = Samples.of(model.step_seconds(count, plan.position, plan.repeats))
            floor = model.shape.floor_seconds(count, plan.past_the_wrap, bandwidth)
            yield row.Step(setup.shape, count, kernels, seconds, floor)

    def _history(self, setup: Setup, rows: int) -> Rows:
        [model], plan = self._models.get(setup), self._plan
        with model.bare_steps(rows) as prepare:
            prepares = [partial(prepare, position) for position in (plan.near, plan.far)]
            near, far = map(Samples.of, seconds_in_turns(self._device, prepares, plan.repeats))
        yield row.History(setup.shape, rows, plan.near, plan.far, near, far)

    def _prompt(self, setup: Setup) -> Rows:
        [model], plan = self._models.get(setup), self._plan
        rows, rate = plan.prompt_rows, self.results.machine.rate("product_flops_per_second")
        seconds = Samples.of(model.step_seconds(1, plan.position, plan.repeats, tokens=rows))
        speed = ratio(model.shape.prompt_flops(rows), seconds.median)
        yield row.Prompt(setup.shape, rows, seconds, speed, ratio(speed, rate))

    def _exact(self, fast_setup: Setup, exact_setup: Setup) -> Rows:
        """Both numerics are open at once, so that their steps can take turns."""
        models, plan = self._models.get(fast_setup, exact_setup), self._plan
        with models[0].bare_steps(plan.exact_rows) as one, models[1].bare_steps(plan.exact_rows) as other:
            prepares = [partial(prepare, plan.position) for prepare in (one, other)]
            fast, exact = map(Samples.of, seconds_in_turns(self._device, prepares, plan.repeats))
        yield row.Exact(exact_setup.shape, plan.exact_rows, fast, exact)
        yield from identity_rows(models[1], plan)

    def _runtime(self, setup: Setup, tokens: int, samplings: Sequence[str]) -> Rows:
        """All sessions at once with full windows; bare steps before and after."""
        [model], plan = self._models.get(setup), self._plan
        bare = model.step_seconds(plan.sessions, plan.position, plan.repeats)
        with sessions(model.runtime, model.shape.histories(plan.sessions, plan.filled)) as session_ids:
            filling = generate_all(model.runtime, session_ids, 1)
            taken = {each: self._repeated(model, session_ids, tokens, _SAMPLINGS[each]) for each in samplings}
        bare += model.step_seconds(plan.sessions, plan.position, plan.repeats)
        for sampling, (tallies, peaks) in taken.items():
            yield row.RuntimeRow(
                setup.shape,
                plan.sessions,
                sampling,
                tokens_per_second=Samples.of(known(tally.speed for tally in tallies)),
                whole_tokens_per_second=Samples.of(tally.whole_speed for tally in tallies),
                bare_tokens_per_second=ratio(plan.sessions, Samples.of(bare).median),
                prompt_tokens_per_second=plan.sessions * plan.filled / filling.seconds,
                peak_bytes=tuple(peaks),
            )

    def _repeated(
        self, model: OpenModel, session_ids: list[str], tokens: int, sampling: SamplingParams
    ) -> tuple[list[Tally], list[int]]:
        """The repetitions, and the peak of device memory after each."""
        tallies, peaks, on_cuda = list[Tally](), list[int](), self._device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
        for _ in range(self._plan.runtime_repeats):
            tallies.append(generate_all(model.runtime, session_ids, tokens, sampling))
            if on_cuda:
                peaks.append(torch.cuda.max_memory_allocated(self._device))
        return tallies, peaks

    def _kernels(self, shape: str, rows: Sequence[int]) -> Rows:
        """No engine stays open: a capture breaks when another thread calls CUDA."""
        self._models.close()
        yield from kernel_rows(SHAPES[shape], rows, self._plan, self._device, self.results.machine)

    def _ours(self, setup: Setup, count: int) -> Rows:
        """Tokens a second through the runtime, from the first call to the last token."""
        [model] = self._models.get(setup)

        def speed(prompts: transformers_peer.Prompts, tokens: int) -> float:
            with sessions(model.runtime, prompts) as session_ids:
                return generate_all(model.runtime, session_ids, tokens).whole_speed

        yield transformers_peer.peer_row(model.shape, self._plan, count, row.OURS, speed)

    def _generate(self, shape: str, count: int) -> Rows:
        generate = transformers_peer.Transformers(SHAPES[shape], self._device).generate
        yield transformers_peer.peer_row(SHAPES[shape], self._plan, count, row.GENERATE, generate)

    def _generate_batch(self, shape: str, count: int, work: str) -> Rows:
        """It gets the device to itself: its cache takes most of what is free."""
        if self._device.type != "cuda":
            yield Absence(Part.TRANSFORMERS, work, "it needs a CUDA device")
            return
        self._models.close()
        yield from transformers_peer.batch_rows(shape, self._plan, count, self._device, work)


def _not_asked(bench: GpuBench) -> Iterator[Absence]:
    for part in Part:
        if part not in bench.parts:
            yield Absence(part, "all", "not asked for")
    if Part.PARITY in bench.parts and bench.model is None:
        yield Absence(Part.PARITY, "all", "no model with real weights was given (--model)")


def measure(bench: GpuBench, run: Run[GpuResults]) -> GpuResults:
    """Do the jobs one after the other, with a partial report after each."""
    device = open_device(bench.device)
    run.machine["device"] = {name: fact for name, fact in vars(device_facts(device)).items() if fact}
    began = time.perf_counter()
    with closing(OpenModels(device, bench.plan)) as models:
        measurement = Measurement(bench, device, models)
        jobs = measurement.jobs()
        work = run.work(sum(job.seconds for job in jobs))
        for job in jobs:
            work.begin(job.label)
            measurement.do(job, bench.seconds - (time.perf_counter() - began))
            work.advance(job.seconds)
            run.checkpoint(measurement.results)
    return measurement.results

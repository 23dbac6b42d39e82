"""`bench gpu` with tiny shapes on the CPU, where the device's backend runs as its own double."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kakeya import loading
from kakeya.bench.benchmark import Run
from kakeya.bench.gpu import parts, steps, transformers_peer
from kakeya.bench.gpu.benchmark import Device, GpuBench
from kakeya.bench.gpu.plan import FULL, QUICK, GpuPlan
from kakeya.bench.gpu.results import GREEDY, SEEDED, Absence, GpuResults, Machine, Part, gpu_gates
from kakeya.bench.gpu.rig import Workshop
from kakeya.bench.gpu.transformers_peer import MeasuredBatch
from kakeya.config import EngineConfig
from kakeya.engine.backends import OpenedBackend, open_backend, open_device
from kakeya.engine.cuda.shapes import StepBuckets, StepShape
from kakeya.errors import ConfigError, PeerFailed
from kakeya.models.checkpoint import Checkpoint
from kakeya.types import BackendChoice, DType


def quickly(*asked: Part, **settings: Any) -> GpuBench:
    return GpuBench(part=list(asked) or None, quick=True, device=Device.CPU, **settings)


def found(*asked: Part, **settings: Any) -> GpuResults:
    return quickly(*asked, **settings).run(Run())


def absent(results: GpuResults, part: Part) -> dict[str, str]:
    """Why, by the work that was not done."""
    return {each.work: each.why for each in results.absent if each.part is part}


@pytest.fixture(scope="module")
def results(chat_model: Path) -> GpuResults:
    return found(model=str(chat_model))


def test_every_part_finds_something(results: GpuResults) -> None:
    assert results.absent == [
        Absence(Part.TRANSFORMERS, "generate_batch, 2 sessions", "it needs a CUDA device")
    ]
    assert [(row.shape, row.rows) for row in results.steps] == [
        ("tiny-qwen3", 1), ("tiny-qwen3", 4), ("tiny-llama", 2), ("tiny-llama", 1), ("tiny-llama", 4),
    ]  # fmt: skip
    assert all(len(row.seconds.samples) == QUICK.repeats for row in results.steps)
    assert [(row.near, row.far) for row in results.history] == [(50, 1000)] * 2
    assert (results.prompt[0].product_share or 0) > 0
    assert (results.exact[0].ratio or 0) > 0
    assert [row.identical for row in results.identity] == [True, True]
    assert [row.sampling for row in results.runtime] == [GREEDY, GREEDY, SEEDED]
    assert all((row.whole_tokens_per_second.median or 0) > 0 for row in results.runtime)
    assert [(row.method, row.sessions) for row in results.transformers] == [
        ("kakeya", 1), ("generate", 1), ("kakeya", 2), ("generate", 2),
    ]  # fmt: skip
    assert all((row.tokens_per_second.median or 0) > 0 for row in results.transformers)
    assert [row.equal_tokens for row in results.parity] == [QUICK.parity_tokens] * 2
    kernels = [(row.shape, row.operation) for row in results.kernels]
    assert kernels.count(("tiny-qwen3", "decode_attention")) == len(QUICK.large_rows)
    assert kernels.count(("tiny-llama", "prompt_attention")) == 1
    assert len(results.seconds) == 17, "two of eighteen jobs have the same name here"


def test_equal_bits_and_tokens_are_all_that_is_judged_here(results: GpuResults) -> None:
    judged = {gate.name: gate.passed for gate in gpu_gates(results) if gate.passed is not None}
    assert judged == {
        "exact: same bits alone, among others, cut": True,
        "greedy tokens equal the CPU engine's": True,
    }


def test_it_writes_down_what_it_has_after_each_job() -> None:
    partial: list[GpuResults] = []
    seen: list[tuple[float, str]] = []
    run = Run(lambda done, work: seen.append((done, work)), partial.append)
    results = quickly(Part.HISTORY).run(run)
    assert [len(each.history) for each in partial] == [0, 1, 2]
    labels = [label for _, label in seen[::2]]
    assert labels == ["machine, rates", "history, tiny-qwen3", "history, tiny-llama"]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == 1.0
    assert {each.part for each in results.absent} == set(Part) - {Part.MACHINE, Part.HISTORY}
    assert {each.why for each in results.absent} == {"not asked for"}
    assert run.machine["device"]["name"] == "CPU"
    assert run.facts["plan"] is QUICK


def test_what_was_measured_beside_transformers_stays_when_the_next_one_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> list[float]:
        raise ImportError("No module named 'transformers'")

    monkeypatch.setattr(transformers_peer, "generate_speeds", broken)
    partial: list[GpuResults] = []
    results = quickly(Part.TRANSFORMERS).run(Run(write=partial.append))
    methods = [[row.method for row in each.transformers] for each in partial]
    assert methods == [[], ["kakeya"], ["kakeya"], ["kakeya"] * 2, ["kakeya"] * 2, ["kakeya"] * 2]
    works = ["generate, 1 session", "generate, 2 sessions", "generate_batch, 2 sessions"]
    assert list(absent(results, Part.TRANSFORMERS)) == works


def test_contenders_come_one_by_one_and_the_riskiest_last() -> None:
    peers = [job.work for job in parts.jobs(FULL, None) if job.part is Part.TRANSFORMERS]
    assert peers == [
        "kakeya, 1 session",
        "generate, 1 session",
        "kakeya, 64 sessions",
        "generate, 64 sessions",
        "generate_batch, 64 sessions",
    ]
    order = [job.part for job in parts.jobs(FULL, None)]
    no_gate_asks_for_them = [Part.KERNELS] * 2
    assert order[-len(peers) - 2 :] == [Part.TRANSFORMERS] * len(peers) + no_gate_asks_for_them


class ClearedWorkshop:
    """Of a device that is there; it can only be cleared."""

    def __init__(self) -> None:
        self.device, self.plan, self.cleared = torch.device("cuda", 0), QUICK, False

    def clear(self) -> None:
        self.cleared = True


def test_batches_are_measured_with_the_device_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(shape: str, plan: GpuPlan, count: int, device: torch.device) -> MeasuredBatch:
        assert shop.cleared
        assert (shape, plan, count, device) == ("tiny-llama", QUICK, 2, shop.device)
        return MeasuredBatch(9.0, "eager", {"default": "ValueError: no"})

    shop: Any = ClearedWorkshop()
    monkeypatch.setattr(transformers_peer, "measured_batch", measured)
    results = parts.measure_generate_batch("tiny-llama", 2, shop, Machine())
    [row] = results.transformers
    assert (row.method, row.tokens_per_second.samples) == ("generate_batch, eager", (9.0,))
    work = "generate_batch, 2 sessions, attention default"
    assert results.absent == [Absence(Part.TRANSFORMERS, work, "ValueError: no")]


def test_batches_that_break_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> MeasuredBatch:
        raise PeerFailed("no answer within 60 s")

    shop: Any = ClearedWorkshop()
    monkeypatch.setattr(transformers_peer, "measured_batch", measured)
    results = parts.measure_generate_batch("tiny-llama", 2, shop, Machine())
    broken = Absence(Part.TRANSFORMERS, "generate_batch, 2 sessions", "no answer within 60 s")
    assert results == GpuResults(absent=[broken])


def test_a_part_that_raises_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> list[float]:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(steps, "step_seconds", broken)
    results = found(Part.STEPS, Part.PROMPT)
    why = [each.why for each in results.absent if each.part is Part.STEPS]
    assert why == ["RuntimeError: an illegal memory access"] * 3
    assert len(results.prompt) == 1
    assert "the part steps failed" in caplog.text


def test_the_devices_own_backend_passes_its_checks_and_keeps_up(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device: runtimes over the device's backend, beside the CPU's where both are compared."""

    def opened(checkpoint: Checkpoint, config: EngineConfig, observed_layers: int) -> OpenedBackend:
        if config.dtype is DType.FLOAT32 and not in_turn.pop():
            return open_backend(checkpoint, config)
        return open_device(checkpoint, config, torch.device("cpu"))

    in_turn = [True, False]
    monkeypatch.setattr(loading, "open_backend", opened)
    results = found(Part.EXACT, Part.RUNTIME, Part.PARITY, model=str(chat_model))
    assert in_turn == []
    assert [row.identical for row in (*results.identity, *results.parity)] == [True] * 4
    assert [(row.whole_tokens_per_second.median or 0) > 0 for row in results.runtime] == [True] * 3


def test_without_the_machines_rates_there_is_nothing_to_hold_steps_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parts, "measured_machine", lambda *_: 1 / 0)
    results = found(Part.STEPS)
    assert absent(results, Part.MACHINE) == {"rates": "ZeroDivisionError: division by zero"}
    assert "rates could not be measured" in absent(results, Part.STEPS)["tiny-llama"]


def test_what_does_not_fit_any_more_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_is_tiny", lambda plan: False)
    results = found(Part.HISTORY, Part.TRANSFORMERS, seconds=60)
    assert len(results.history) == 2
    assert [row.method for row in results.transformers] == ["kakeya", "generate"] * 2
    [(work, why)] = absent(results, Part.TRANSFORMERS).items()
    assert work == "generate_batch, 2 sessions"
    assert why.startswith("takes about 65 s, and ")


def test_tiny_shapes_are_measured_however_little_time_is_left() -> None:
    results = found(Part.PROMPT, Part.PARITY, seconds=0.001)
    assert len(results.prompt) == 1
    assert absent(results, Part.PARITY) == {"all": "no model with real weights was given (--model)"}


def test_what_takes_memory_of_its_own_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[str] = []
    jobs = [parts.Job(part, "any", 0.0, lambda *_: GpuResults()) for part in Part]
    monkeypatch.setattr(parts, "jobs", lambda plan, model: jobs)
    monkeypatch.setattr(Workshop, "note_memory", lambda shop: looks.append(begun[-1]))
    begun: list[str] = []
    quickly().run(Run(lambda done, work: begun.append(work)))
    assert looks == [f"{part}, any" for part in Part if part not in (Part.KERNELS, Part.TRANSFORMERS)]


def test_every_bare_step_of_the_whole_plan_has_a_graph() -> None:
    config = EngineConfig(
        backend=BackendChoice.CUDA,
        cache=FULL.cache,
        capacity=FULL.sessions,
        prefill_block=FULL.prefill_block,
        max_batch_tokens=FULL.max_batch_tokens,
    )
    buckets = StepBuckets(config)
    rows = {*FULL.large_rows, *FULL.middle_rows, *FULL.small_rows, FULL.history_rows_large, FULL.exact_rows}
    assert {StepShape(count) for count in rows} <= set(buckets.captured), "not one row is padding"
    assert buckets.captured_mixed(0, FULL.prompt_rows, 1, 1) in buckets.captured
    assert FULL.filled > FULL.cache.slots


def test_the_whole_plan_is_within_eight_minutes() -> None:
    assert sum(job.seconds for job in parts.jobs(FULL, "any")) < 480
    assert {job.part for job in parts.jobs(FULL, "any")} == set(Part)
    assert Part.PARITY not in {job.part for job in parts.jobs(FULL, None)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(ConfigError, match="bench gpu needs a CUDA device; torch sees none"):
        GpuBench().check(picture=False)


@pytest.mark.parametrize(
    ("bench", "message"),
    [
        (GpuBench(device=Device.CPU), "only --quick runs"),
        (quickly(seconds=0.0), "seconds must be above 0"),
        (quickly(Part.PROMPT), "draws the part steps"),
    ],
)
def test_bad_settings_are_refused(bench: GpuBench, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench.check(picture=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_everything_runs_on_a_device(chat_model: Path) -> None:
    results = GpuBench(quick=True, model=str(chat_model)).run(Run())
    assert [each for each in results.absent if "generate_batch" not in each.work] == []
    assert [row.identical for row in (*results.identity, *results.parity)] == [True] * 4
    assert all(row.memory_growth is not None for row in results.runtime)
    assert all(row.used.opened is not None for row in results.memory)
    for row in results.kernels:
        assert {name: timing.captured for name, timing in row.timings.items()} == {
            "triton": True,
            "torch": True,
        }

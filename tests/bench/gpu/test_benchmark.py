"""`bench gpu` with tiny shapes on the CPU, where the CUDA backend runs with torch kernels."""

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kakeya import loading
from kakeya.bench.benchmark import Run
from kakeya.bench.gpu import measure, transformers_peer
from kakeya.bench.gpu.benchmark import Device, GpuBench
from kakeya.bench.gpu.measure import Job, Measurement
from kakeya.bench.gpu.models import OpenModel, OpenModels
from kakeya.bench.gpu.plan import FULL, QUICK
from kakeya.bench.gpu.results import GREEDY, SEEDED, Absence, GpuResults, Part, Peer
from kakeya.bench.stats import Samples
from kakeya.config import EngineConfig
from kakeya.engine.backends import OpenedBackend, open_backend, open_device
from kakeya.engine.cuda.shapes import StepBuckets, StepShape
from kakeya.errors import ConfigError
from kakeya.models.checkpoint import Checkpoint
from kakeya.types import BackendChoice, DType
from support import programs
from support.untraced import importing

CPU = torch.device("cpu")


def quickly(*asked: Part, **settings: Any) -> GpuBench:
    return GpuBench(part=list(asked) or None, quick=True, device=Device.CPU, **settings)


def absent(results: GpuResults, part: Part) -> dict[str, str]:
    """Why, by the work that was not done."""
    return {each.work: each.why for each in results.absent if each.part is part}


def jobs_of(bench: GpuBench) -> list[Job]:
    return Measurement(bench, CPU, OpenModels(CPU, bench.plan)).jobs()


def test_every_part_finds_something_and_is_written_down_at_once(chat_model: Path) -> None:
    bench = quickly(model=str(chat_model))
    written: list[int] = []
    seen: list[tuple[float, str]] = []
    run = Run(lambda *told: seen.append(told), lambda results: written.append(len(results.seconds)))
    results = bench.run(run)
    batch = Absence(Part.TRANSFORMERS, "generate_batch, 2 sessions", "it needs a CUDA device")
    assert results.absent == [batch]
    assert written == sorted(written)
    assert written[-1] == len(results.seconds) == 17, "two of eighteen jobs have the same name here"
    assert [label for _, label in seen[::2]] == [job.label for job in jobs_of(bench)]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == 1.0
    assert run.machine["device"]["name"] == "CPU"
    assert run.facts["plan"] is QUICK
    steps = [(row.shape, row.rows) for row in results.steps]
    assert steps == [("tiny-qwen3", 1), ("tiny-qwen3", 4), *(("tiny-llama", rows) for rows in (2, 1, 4))]
    assert all(len(row.seconds.samples) == QUICK.repeats for row in results.steps)
    assert [(row.near, row.far, (row.ratio or 0) > 0) for row in results.history] == [(50, 1000, True)] * 2
    assert (results.prompt[0].product_share or 0) > 0
    assert (results.exact[0].ratio or 0) > 0
    assert [row.sampling for row in results.runtime] == [GREEDY, GREEDY, SEEDED]
    assert all((row.whole_tokens_per_second.median or 0) > 0 for row in results.runtime)
    peers = [(row.method, row.sessions, (row.best() or 0) > 0) for row in results.transformers]
    assert peers == [(method, count, True) for count in (1, 2) for method in ("kakeya", "generate")]
    assert [row.equal_tokens for row in results.parity] == [QUICK.parity_tokens] * 2
    kernels = [(row.shape, row.operation) for row in results.kernels]
    assert kernels.count(("tiny-qwen3", "decode_attention")) == len(QUICK.large_rows)
    assert kernels.count(("tiny-llama", "prefill_attention")) == 1
    memory = [(row.shape, row.sessions, row.numerics) for row in results.memory]
    large = [("tiny-qwen3", 4, "fast"), ("tiny-qwen3", 4, "exact")]
    assert memory == [*large, ("tiny-llama", 2, "fast"), ("tiny-llama", 4, "fast")]
    assert all(row.planned["total"] > row.planned["weights"] > 0 for row in results.memory)
    assert {each for row in results.memory for each in row.used.values()} == {None}, "a CPU does not tell"
    assert {gate.name: gate.passed for gate in bench.gates(results) if gate.passed is not None} == {
        "exact: same bits alone, among others, cut": True,
        "greedy tokens equal the CPU engine's": True,
    }


def test_the_whole_plan_is_in_order_and_within_eight_minutes() -> None:
    jobs = jobs_of(GpuBench(model="any"))
    assert sum(job.seconds for job in jobs) < 480
    assert {job.part for job in jobs} == set(Part)
    assert Part.PARITY not in {job.part for job in jobs_of(GpuBench())}
    assert [job.work for job in jobs[-7:]] == [
        "kakeya, 1 session",
        "generate, 1 session",
        "kakeya, 64 sessions",
        "generate, 64 sessions",
        "generate_batch, 64 sessions",
        "qwen3-8b",
        "smollm2-135m",
    ], "one by one, the riskiest last, and behind them what no gate needs"


def test_every_bare_step_of_the_whole_plan_has_a_graph() -> None:
    buckets = StepBuckets(FULL.engine_config(FULL.sessions, backend=BackendChoice.CUDA))
    rows = {*FULL.large_rows, *FULL.middle_rows, *FULL.small_rows, FULL.history_rows_large, FULL.exact_rows}
    assert {StepShape(count) for count in rows} <= set(buckets.captured), "no row is padding"
    assert buckets.captured_mixed(0, FULL.prompt_rows, 1, 1) in buckets.captured
    assert FULL.filled > FULL.cache.slots


def test_jobs_that_fail_are_absent_and_do_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("an illegal memory access")

    for where, name in (
        (measure, "measured_machine"),
        (OpenModel, "step_seconds"),
        (transformers_peer, "Transformers"),
    ):
        monkeypatch.setattr(where, name, broken)
    results = quickly(Part.STEPS, Part.PROMPT, Part.HISTORY, Part.RUNTIME, Part.TRANSFORMERS).run(Run())
    why = "RuntimeError: an illegal memory access"
    assert absent(results, Part.MACHINE) == {"rates": why}
    assert "rates could not be measured" in absent(results, Part.STEPS)["tiny-llama"]
    assert absent(results, Part.RUNTIME) == {"tiny-qwen3": why, "tiny-llama": why}
    assert len(results.history) == 2
    assert [row.method for row in results.transformers] == ["kakeya"] * 2
    works = ["generate, 1 session", "generate, 2 sessions", "generate_batch, 2 sessions"]
    assert list(absent(results, Part.TRANSFORMERS)) == works
    assert absent(results, Part.EXACT) == {"all": "not asked for"}
    assert "the part steps failed" in caplog.text


def test_jobs_that_have_no_time_left_are_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = quickly(Part.PROMPT, Part.PARITY, seconds=0.001).run(Run())
    assert len(tiny.prompt) == 1, "tiny shapes are measured however little time is left"
    assert absent(tiny, Part.PARITY) == {"all": "no model with real weights was given (--model)"}
    monkeypatch.setattr(measure, "QUICK", None)  # now time counts
    results = quickly(Part.HISTORY, Part.RUNTIME, seconds=20).run(Run())
    assert len(results.history) == 2
    assert absent(results, Part.RUNTIME)["tiny-qwen3"].startswith("takes about 23 s, and ")
    assert results.runtime == []


def test_jobs_that_use_memory_of_their_own_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    begun: list[str] = []
    jobs = [Job(part, "any", 0.0, lambda: iter(())) for part in Part]
    monkeypatch.setattr(Measurement, "jobs", lambda self: jobs)
    monkeypatch.setattr(OpenModels, "note_steps", lambda models: noted.append(begun[-1]))
    quickly().run(Run(lambda done, work: begun.append(work)))
    assert noted == [f"{part}, any" for part in Part if part not in (Part.KERNELS, Part.TRANSFORMERS)]


def test_batches_are_measured_with_the_device_to_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(shape: str, plan: object, count: int, device: torch.device, work: str) -> list[Peer]:
        assert (closed, shape, plan, count, device.type) == ([True], "tiny-llama", QUICK, 2, "cuda")
        return [Peer(shape, count, work, Samples((9.0,)))]

    closed: list[bool] = []
    models: Any = SimpleNamespace(close=lambda: closed.append(True), memory={})
    monkeypatch.setattr(transformers_peer, "batch_rows", batch)
    measurement = Measurement(quickly(Part.TRANSFORMERS), torch.device("cuda", 0), models)
    measurement.do(measurement.jobs()[-1], 0.0)
    assert [row.method for row in measurement.results.transformers] == ["generate_batch, 2 sessions"]


def test_the_devices_own_backend_passes_its_checks_and_keeps_up(
    chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device: runtimes over the CUDA backend, beside the CPU's where both are compared."""

    def opened(checkpoint: Checkpoint, config: EngineConfig, *_: object) -> OpenedBackend:
        if config.dtype is DType.FLOAT32 and not in_turn.pop():
            return open_backend(checkpoint, config)
        return open_device(checkpoint, config, CPU)

    in_turn = [True, False]
    monkeypatch.setattr(loading, "open_backend", opened)
    results = quickly(Part.EXACT, Part.RUNTIME, Part.PARITY, model=str(chat_model)).run(Run())
    assert in_turn == []
    assert [row.identical for row in (*results.identity, *results.parity)] == [True] * 4
    assert [(row.whole_tokens_per_second.median or 0) > 0 for row in results.runtime] == [True] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_everything_runs_on_a_device(chat_model: Path) -> None:
    results = GpuBench(quick=True, model=str(chat_model)).run(Run())
    assert [each for each in results.absent if "generate_batch" not in each.work] == []
    assert [row.identical for row in (*results.identity, *results.parity)] == [True] * 4
    assert all(row.memory_growth is not None for row in results.runtime)
    assert all(row.used["opened"] is not None for row in results.memory)
    captured = [{name: each.captured for name, each in row.timings.items()} for row in results.kernels]
    assert captured == [{"triton": True, "torch": True}] * len(results.kernels)


def test_the_verb_writes_prints_and_draws(kakeya_verb: programs.Run, tmp_path: Path) -> None:
    files = ("--output", str(tmp_path / "g.json"), "--picture", str(tmp_path / "g.svg"))
    outcome = kakeya_verb("bench", "gpu", "--device", "cpu", "--quick", "--part", "steps", *files)
    assert outcome.status == 0, outcome.err
    assert "Bare steps past the wrap" in outcome.out
    assert json.loads((tmp_path / "g.json").read_text())["kind"] == "gpu"
    assert (tmp_path / "g.svg").read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("bench", "message"),
    [
        (GpuBench(device=Device.CPU), "only --quick runs"),
        (quickly(seconds=0.0), "seconds must be above 0"),
        (quickly(Part.PROMPT), "draws the part steps"),
        (GpuBench(), "bench gpu needs a CUDA device; torch sees none"),
    ],
)
def test_bad_settings_are_refused(bench: GpuBench, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        bench.check(picture=True)


@pytest.mark.parametrize("module", ["gpu.benchmark", "gpu.results", "gpu.tables", "quality.benchmark"])
def test_flags_and_conclusions_need_no_more_than_the_command_line_does(module: str) -> None:
    """They can be read anywhere, and help does not wait for torch."""
    modules = f"kakeya.bench.{module}, kakeya.bench.registry"
    program = f"import sys, {modules}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert not {"torch", "triton", "transformers", "tokenizers", "psutil"} & set(outcome.stdout.split())


# What a machine with a GPU may lack: it needs torch, triton, transformers, safetensors, tokenizers, numpy,
# rich, typer and grpcio, and what those bring.
ABSENT = (
    "fastapi", "gguf", "google", "grpc_health", "grpc_reflection", "httptools", "httpx", "llguidance",
    "opentelemetry", "platformdirs", "prometheus_client", "psutil", "starlette", "uvicorn",
)  # fmt: skip


def test_it_runs_from_a_source_tree_with_few_packages(tmp_path: Path) -> None:
    assert callable(import_module("kakeya.__main__").main), "run only when asked"
    lacking = f"import runpy, sys; sys.modules.update(dict.fromkeys({ABSENT!r}))\n"
    foreign = importing("torch", "transformers.models.auto.modeling_auto")
    program = lacking + foreign + "runpy.run_module('kakeya', run_name='__main__', alter_sys=True)"
    parts = [flag for part in ("runtime", "transformers", "exact") for flag in ("--part", part)]
    command = [sys.executable, "-c", program, "bench", "gpu", "--device", "cpu", "--quick", *parts, "--json"]
    outcome = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    results = json.loads(outcome.stdout)["results"]
    assert results["runtime"]
    assert results["transformers"]
    assert {each["why"] for each in results["absent"]} == {"not asked for", "it needs a CUDA device"}

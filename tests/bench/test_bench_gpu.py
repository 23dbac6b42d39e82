"""`bench gpu` with tiny shapes on the CPU, where the device's backend runs as its own double."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kakeya import runtime
from kakeya.bench import gpu, gpu_batch_peer, gpu_parts, gpu_peers, gpu_steps
from kakeya.bench.gpu import GpuBench, run
from kakeya.bench.gpu_batch_peer import MeasuredBatch
from kakeya.bench.gpu_page import gpu_page
from kakeya.bench.gpu_plan import FULL, QUICK, GpuPlan
from kakeya.bench.gpu_results import GREEDY, SEEDED, Part, absence
from kakeya.bench.gpu_rig import RigKey
from kakeya.bench.gpu_shapes import TINY_LLAMA
from kakeya.bench.report import Report
from kakeya.config import EngineConfig
from kakeya.engine.cuda.shapes import Ladder, StepShape
from kakeya.engine.opening import OpenedBackend, open_backend, open_device
from kakeya.errors import ConfigError, PeerFailed
from kakeya.models.checkpoint import Checkpoint
from kakeya.types import BackendChoice, DType

CPU = torch.device("cpu")
TINY = RigKey(TINY_LLAMA.name, 4)


@pytest.fixture(scope="module")
def reports(chat_model: Path) -> list[Report]:
    """All parts, with the partial reports before the last one."""
    partial: list[Report] = []
    bench = GpuBench(device="cpu", quick=True, model=str(chat_model))
    return [*partial, run(bench, lambda done, work: None, partial.append)]


def test_every_part_finds_something(reports: list[Report]) -> None:
    results = reports[-1].results
    assert results["absent"] == [
        absence(Part.TRANSFORMERS, "generate_batch, 2 sessions", "it needs a CUDA device")
    ]
    assert [(row["shape"], row["rows"]) for row in results["steps"]] == [
        ("tiny-qwen3", 1), ("tiny-qwen3", 4), ("tiny-llama", 2), ("tiny-llama", 1), ("tiny-llama", 4),
    ]  # fmt: skip
    assert all(len(row["seconds"]["samples"]) == QUICK.repeats for row in results["steps"])
    assert [(row["near"], row["far"]) for row in results["history"]] == [(50, 1000)] * 2
    assert results["prompt"][0]["product_share"] > 0
    assert results["exact"][0]["ratio"] > 0
    assert [row["identical"] for row in results["identity"]] == [True, True]
    assert [row["sampling"] for row in results["runtime"]] == [GREEDY, GREEDY, SEEDED]
    assert all(row["whole_tokens_per_second"]["median"] > 0 for row in results["runtime"])
    assert [(row["method"], row["sessions"]) for row in results["transformers"]] == [
        ("kakeya", 1),
        ("generate", 1),
        ("kakeya", 2),
        ("generate", 2),
    ]
    assert all(row["tokens_per_second"]["median"] > 0 for row in results["transformers"])
    assert [row["equal_tokens"] for row in results["parity"]] == [QUICK.parity_tokens] * 2
    kernels = [(row["shape"], row["operation"]) for row in results["kernels"]]
    assert kernels.count(("tiny-qwen3", "decode_attention")) == len(QUICK.large_rows)
    assert kernels.count(("tiny-llama", "prompt_attention")) == 1
    assert len(results["seconds"]) == 17, "two of eighteen jobs have the same name here"


def test_the_report_is_whole_and_shows_itself(reports: list[Report], chat_model: Path) -> None:
    report = reports[-1]
    assert not report.partial
    assert report.exit_status == 0, [gate.reason for gate in report.gates if gate.passed is False]
    judged = {gate.name for gate in report.gates if gate.passed is not None}
    assert judged == {"exact: same bits alone, among others, cut", "greedy tokens equal the CPU engine's"}
    assert report.config["model"] == chat_model.name
    assert report.machine["device"]["name"] == "CPU"
    assert json.loads(report.to_json())["results"] == report.results
    assert "Bare steps past the wrap" in gpu_page(report)


def test_it_writes_down_what_it_has_after_each_job() -> None:
    partial: list[Report] = []
    seen: list[tuple[float, str]] = []
    bench = GpuBench(device="cpu", quick=True, parts=frozenset({Part.HISTORY}))
    report = run(bench, lambda done, work: seen.append((done, work)), partial.append)
    assert [len(each.results["history"]) for each in partial] == [0, 1, 2]
    assert all(each.partial for each in partial)
    assert [label for _, label in seen[::2]] == [
        "machine, rates",
        "history, tiny-qwen3",
        "history, tiny-llama",
    ]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == 1.0
    absent = {each["part"]: each["why"] for each in report.results["absent"]}
    assert absent == dict.fromkeys(
        ["steps", "prompt", "exact", "runtime", "kernels", "transformers", "parity"], "not asked for"
    )


def test_what_was_measured_beside_transformers_stays_when_the_next_one_breaks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> list[float]:
        raise ImportError("No module named 'transformers'")

    monkeypatch.setattr(gpu_peers, "generate_speeds", broken)
    partial: list[Report] = []
    bench = GpuBench(device="cpu", quick=True, parts=frozenset({Part.TRANSFORMERS}))
    report = run(bench, lambda *_: None, partial.append)
    methods = [[row["method"] for row in each.results["transformers"]] for each in partial]
    assert methods == [[], ["kakeya"], ["kakeya"], ["kakeya"] * 2, ["kakeya"] * 2, ["kakeya"] * 2]
    absent = [each["work"] for each in report.results["absent"] if each["part"] == "transformers"]
    assert absent == ["generate, 1 session", "generate, 2 sessions", "generate_batch, 2 sessions"]


def test_contenders_come_one_by_one_and_the_riskiest_last() -> None:
    peers = [job.work for job in gpu_parts.jobs(FULL, None) if job.part is Part.TRANSFORMERS]
    assert peers == [
        "kakeya, 1 session",
        "generate, 1 session",
        "kakeya, 64 sessions",
        "generate, 64 sessions",
        "generate_batch, 64 sessions",
    ]
    parts = [job.part for job in gpu_parts.jobs(FULL, None)]
    no_gate_asks_for_them = [Part.KERNELS] * 2
    assert parts[-len(peers) - 2 :] == [Part.TRANSFORMERS] * len(peers) + no_gate_asks_for_them


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

    shop = ClearedWorkshop()
    monkeypatch.setattr(gpu_batch_peer, "measured", measured)
    found = gpu_parts.measure_generate_batch("tiny-llama", 2, shop, {})
    [row] = found["transformers"]
    assert (row["method"], row["tokens_per_second"]["samples"]) == ("generate_batch, eager", [9.0])
    assert found["absent"] == [
        absence(Part.TRANSFORMERS, "generate_batch, 2 sessions, attention default", "ValueError: no")
    ]


def test_batches_that_break_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*_: object) -> MeasuredBatch:
        raise PeerFailed("generate_batch gave no answer within 60 s")

    monkeypatch.setattr(gpu_batch_peer, "measured", measured)
    assert gpu_parts.measure_generate_batch("tiny-llama", 2, ClearedWorkshop(), {}) == {
        "absent": [
            absence(
                Part.TRANSFORMERS, "generate_batch, 2 sessions", "generate_batch gave no answer within 60 s"
            )
        ]
    }


def test_a_part_that_raises_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> list[float]:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(gpu_steps, "step_seconds", broken)
    parts = frozenset({Part.STEPS, Part.PROMPT})
    report = run(GpuBench(device="cpu", quick=True, parts=parts), lambda *_: None, lambda _: None)
    why = [each["why"] for each in report.results["absent"] if each["part"] == "steps"]
    assert why == ["RuntimeError: an illegal memory access"] * 3
    assert len(report.results["prompt"]) == 1
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
    monkeypatch.setattr(runtime, "open_backend", opened)
    parts = frozenset({Part.EXACT, Part.RUNTIME, Part.PARITY})
    bench = GpuBench(device="cpu", quick=True, parts=parts, model=str(chat_model))
    results = run(bench, lambda *_: None, lambda _: None).results
    assert in_turn == []
    assert [row["identical"] for row in results["identity"] + results["parity"]] == [True] * 4
    assert [row["whole_tokens_per_second"]["median"] > 0 for row in results["runtime"]] == [True] * 3


def test_without_the_machines_rates_there_is_nothing_to_hold_steps_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu_parts, "measured_rates", lambda *_: 1 / 0)
    parts = frozenset({Part.STEPS})
    report = run(GpuBench(device="cpu", quick=True, parts=parts), lambda *_: None, lambda _: None)
    reasons = {
        each["work"]: each["why"] for each in report.results["absent"] if each["part"] in ("machine", "steps")
    }
    assert reasons["rates"] == "ZeroDivisionError: division by zero"
    assert "rates could not be measured" in reasons["tiny-llama"]


def test_what_does_not_fit_any_more_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_is_tiny", lambda shop: False)
    parts = frozenset({Part.HISTORY, Part.TRANSFORMERS})
    bench = GpuBench(device="cpu", quick=True, parts=parts, seconds=60)
    report = run(bench, lambda *_: None, lambda _: None)
    assert len(report.results["history"]) == 2
    assert [row["method"] for row in report.results["transformers"]] == ["kakeya", "generate"] * 2
    [skipped] = [each for each in report.results["absent"] if each["part"] == "transformers"]
    assert skipped["work"] == "generate_batch, 2 sessions"
    assert skipped["why"].startswith("takes about 65 s, and ")


def test_tiny_shapes_are_measured_however_little_time_is_left() -> None:
    bench = GpuBench(device="cpu", quick=True, parts=frozenset({Part.PROMPT, Part.PARITY}), seconds=0.001)
    report = run(bench, lambda *_: None, lambda _: None)
    assert len(report.results["prompt"]) == 1
    [parity] = [each for each in report.results["absent"] if each["part"] == "parity"]
    assert parity["why"] == "no model with real weights was given (--model)"


def test_every_bare_step_of_the_whole_plan_has_a_graph() -> None:
    config = EngineConfig(
        backend=BackendChoice.CUDA,
        cache=FULL.cache,
        capacity=FULL.sessions,
        prefill_block=FULL.prefill_block,
        max_batch_tokens=FULL.max_batch_tokens,
    )
    ladder = Ladder(config)
    rows = {*FULL.large_rows, *FULL.middle_rows, *FULL.small_rows, FULL.history_rows_large, FULL.exact_rows}
    assert {StepShape(count) for count in rows} <= set(ladder.captured), "not one row is padding"
    assert ladder.captured_mixed(0, FULL.prompt_rows, 1, 1) in ladder.captured
    assert FULL.filled > FULL.cache.slots


def test_the_whole_plan_is_within_eight_minutes() -> None:
    assert sum(job.seconds for job in gpu_parts.jobs(FULL, "any")) < 480
    assert {job.part for job in gpu_parts.jobs(FULL, "any")} == set(Part)
    assert Part.PARITY not in {job.part for job in gpu_parts.jobs(FULL, None)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so() -> None:
    with pytest.raises(ConfigError, match="bench gpu needs a CUDA device; torch sees none"):
        GpuBench()


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"device": "cpu"}, "only --quick runs"), ({"device": "cpu", "quick": True, "seconds": 0.0}, "seconds")],
)
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GpuBench(**settings)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_everything_runs_on_a_device(chat_model: Path) -> None:
    report = run(GpuBench(quick=True, model=str(chat_model)), lambda *_: None, lambda _: None)
    absent = [each for each in report.results["absent"] if "generate_batch" not in each["work"]]
    assert absent == []
    assert [row["identical"] for row in report.results["identity"]] == [True, True]
    assert [row["identical"] for row in report.results["parity"]] == [True, True]
    assert all(row["memory_growth"] is not None for row in report.results["runtime"])
    assert all(row["used"]["opened"] is not None for row in report.results["memory"])
    for row in report.results["kernels"]:
        assert {name: timing["captured"] for name, timing in row["timings"].items()} == {
            "triton": True,
            "torch": True,
        }

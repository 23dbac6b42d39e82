"""What `bench gpu` concludes and shows, from the committed evidence, which passes every gate. No device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kakeya.bench.gpu import results as row
from kakeya.bench.gpu.plan import LARGE, SMALL
from kakeya.bench.gpu.results import Absence, GpuResults, Part, gpu_gates
from kakeya.bench.gpu.shapes import SHAPES
from kakeya.bench.gpu.tables import show
from kakeya.bench.registry import shown
from kakeya.bench.report import as_json, from_json, read_report
from kakeya.bench.stats import Samples
from kakeya.bench.tables import Chart, Table

REPORT = read_report(Path(__file__).parents[3] / "docs" / "evidence" / "gpu-h200.json")
GOOD: GpuResults = from_json(GpuResults, REPORT.results)
SLOW, FAST = Samples((9.0,)), Samples((1e9,))
UNKNOWN = {"earlier": None, "opened": None, "stepped": None}


def test_the_evidence_is_judged_as_it_was() -> None:
    assert {gate.name: gate for gate in gpu_gates(GOOD)} == {gate.name: gate for gate in REPORT.gates}
    assert [gate.passed for gate in REPORT.gates] == [True] * 22
    assert from_json(GpuResults, as_json(GOOD)) == GOOD, "results survive their report"


def test_floors_are_those_of_the_evidence() -> None:
    bandwidth = GOOD.machine.rate("copy_bytes_per_second")
    for step in GOOD.steps:
        floor = SHAPES[step.shape].floor_seconds(step.rows, 1028, bandwidth)
        assert floor == pytest.approx(step.floor_seconds)
        assert floor < (step.target_ms or 99) / 1000


# Rows, what is changed in each of them, and the gate that then fails.
FAILING: list[tuple[str, tuple[int, ...], dict[str, Any], str]] = [
    ("steps", (0, 1, 2, 3, 4, 6), {"seconds": Samples((0.02,)), "floor_seconds": 0.02}, "step, ms"),
    ("steps", (0, 1, 2), {"floor_seconds": 1e-9}, "floor over step"),
    ("history", (0, 1), {"far_seconds": SLOW}, "step at 1,000,000 over 2,000"),
    ("prompt", (0,), {"product_share": 0.49}, "prompt, share of the product rate"),
    ("exact", (0,), {"exact_seconds": SLOW}, "exact step over fast"),
    ("runtime", (0, 1), {"bare_tokens_per_second": 1e9}, "runtime over bare steps"),
    ("runtime", (0, 1), {"peak_bytes": (100, 102)}, "device memory, last over first"),
    ("transformers", (1, 3, 4), {"tokens_per_second": FAST}, "speed over transformers"),
    ("identity", (0, 1), {"identical": False}, "same bits alone, among others, cut"),
    ("parity", (0, 3), {"identical": False}, "greedy tokens equal the CPU engine's"),
    ("memory", (1,), {"used": UNKNOWN | {"opened": 10**12}}, "memory_within_plan"),
    ("memory", (1,), {"used": UNKNOWN | {"stepped": 10**12}}, "memory_within_plan"),
]


def test_every_gate_can_fail() -> None:
    failed = set()
    for name, places, changes, what in FAILING:
        for place in places:
            rows = list(getattr(GOOD, name))
            rows[place] = replace(rows[place], **changes)
            [gate] = [gate for gate in gpu_gates(replace(GOOD, **{name: rows})) if gate.passed is False]
            assert gate.name.endswith(what)
            failed.add(gate.name)
    assert failed == {gate.name for gate in REPORT.gates}


def test_what_was_not_measured_says_why() -> None:
    reasons = ((Part.STEPS, "RuntimeError: broke"), (Part.STEPS, "no time"), (Part.PARITY, "no model"))
    absent = [Absence(part, "any", why) for part, why in reasons]
    memory = [replace(GOOD.memory[0], used=UNKNOWN)]
    gates = {gate.name: gate for gate in gpu_gates(GpuResults(absent=absent, memory=memory))}
    assert {gate.passed for gate in gates.values()} == {None}
    assert gates["qwen3-8b, 1 session: step, ms"].reason == "RuntimeError: broke; no time"
    assert gates["greedy tokens equal the CPU engine's"].reason == "no model"
    assert "a device that tells" in gates["memory_within_plan"].reason
    unmeasured = gates["qwen3-8b: prompt, share of the product rate"]
    assert unmeasured.reason == "this shape was not measured in this run"


@pytest.mark.parametrize(
    ("name", "kept", "unjudged"),
    [
        ("transformers", [0, 1, 2, 3], []),  # their best method that there is
        ("transformers", [0, 2], ["speed over transformers"] * 2),
        ("transformers", [1, 3], ["speed over transformers"] * 2),
        ("runtime", [0, 2], ["runtime over bare steps", "device memory, last over first"]),  # greedy alone
        ("kernels", [], []),
    ],
)
def test_only_what_was_measured_is_judged(name: str, kept: list[int], unjudged: list[str]) -> None:
    gates = gpu_gates(replace(GOOD, **{name: [getattr(GOOD, name)[at] for at in kept]}))
    assert [gate.name.partition(": ")[2] for gate in gates if gate.passed is None] == unjudged
    assert [gate.passed for gate in gates].count(True) == 22 - len(unjudged)


# Each table and its last line.
TABLES = """
Measured rates|bf16 matmul, TFLOP/s|807
Bare steps past the wrap|smollm2-135m|triton (NVIDIA H200)|256|2.216|1.487|0.671|2.4
The same step at two histories|smollm2-135m|256|2,000|2.211|1,000,000|2.211|1.0002
A prompt block of one session|qwen3-8b|2,048|53.146|38,536|535|0.663
What exact numerics cost|qwen3-8b|64|6.943|7.407|1.067
Exact numerics: tokens and log-probabilities|qwen3-8b|prompt cut after 700 tokens|8|yes
Through the runtime, tokens/s|smollm2-135m|temperature 0.8, top-p 0.95|256|108,821|115,610|0.941|103,925|381,987|6.82 → 6.82
Kernels by themselves|smollm2-135m|choose|256 rows, temperature 0.8, top-p 0.95|50.33|–|11.8|136.3|0.087|4,278.9|0.003
Beside transformers|smollm2-135m|generate_batch|64|804|78.9
Greedy tokens beside the CPU engine's, float32|SmolLM2-135M-Instruct.Q4_1.gguf|1,100|64|64|yes
Device memory, planned and used, MiB|smollm2-135m|fast|256|257|168|760|169|1,353|62|62|0.045|5,750|5,872
Not measured|parity|all|no model
"""  # noqa: E501


def last_lines(results: GpuResults) -> list[str]:
    tables = [each for each in show(results) if isinstance(each, Table)]
    return ["|".join([each.title, *each.cells[-1]]) for each in tables]


def test_the_page_has_a_table_for_each_part_that_was_measured() -> None:
    lines = TABLES.strip().split("\n")
    assert last_lines(replace(GOOD, absent=[Absence(Part.PARITY, "all", "no model")])) == lines
    assert last_lines(GOOD) == lines[:-1]
    assert [each.title for each in shown(REPORT)] == [each.title for each in show(GOOD)]
    assert show(GpuResults()) == []
    timing = row.KernelTiming(Samples((2e-3,)), 0.001, captured=False)
    kernel = replace(GOOD.kernels[0], flops=34_493_956_096, timings={"torch": timing})
    memory = row.Memory(LARGE, 256, "fast", GOOD.memory[0].planned, 2**20, UNKNOWN)
    peaks = row.RuntimeRow(SMALL, 4, row.GREEDY, Samples(), Samples((9.0,)), 4.0, 1.0, ())
    [never_full, kernels, used] = last_lines(GpuResults(kernels=[kernel], memory=[memory], runtime=[peaks]))
    assert never_full.endswith("|–|4|–|9|1|–")
    assert kernels.endswith("|34.49|1.5|–|–|2,000.0 (no graph)|0.001")
    assert used.endswith("|–|–|–|–|1")


def test_the_picture_shows_steps_beside_floors() -> None:
    [chart] = [each for each in show(GOOD) if isinstance(each, Chart)]
    assert (show(GOOD).index(chart), chart.title, chart.picture) == (2, "Step and memory floor", True)
    assert chart.at[:2] == ["8b × 1", "8b × 64"]
    values = {each.name: each.values[1] for each in chart.series}
    assert values == {"floor": pytest.approx(5.832, abs=0.001), "step": pytest.approx(6.810, abs=0.001)}

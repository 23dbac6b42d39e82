"""What `bench gpu` concludes and shows: floors, rows, gates, tables. No device."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kakeya.bench.gpu.benchmark import GpuBench
from kakeya.bench.gpu.plan import LARGE, MIDDLE, SMALL
from kakeya.bench.gpu.results import (
    GREEDY,
    OURS,
    SEEDED,
    STEP_TARGETS,
    Absence,
    Exact,
    GpuResults,
    History,
    Identity,
    Kernel,
    KernelTiming,
    Machine,
    Memory,
    Parity,
    Part,
    Peer,
    PlannedMemory,
    Prompt,
    RuntimeRow,
    Step,
    UsedMemory,
    gpu_gates,
    show,
)
from kakeya.bench.gpu.shapes import SHAPES
from kakeya.bench.registry import shown
from kakeya.bench.report import Gate, as_json, from_json, read_report
from kakeya.bench.stats import Samples
from kakeya.bench.tables import Chart, Table

EVIDENCE = Path(__file__).parents[2] / "docs" / "evidence" / "gpu-h200.json"
BANDWIDTH, PRODUCTS, MIB = 4.28e12, 790e12, 2**20
# Milliseconds, as measured for the targets: window 1,024 and 4 sinks.
FLOORS = {
    (LARGE, 1): 3.57,
    (LARGE, 64): 5.8,
    (LARGE, 256): 12.6,
    (MIDDLE, 256): 7.3,
    (SMALL, 1): 0.07,
    (SMALL, 256): 1.47,
}


@pytest.mark.parametrize(("shape", "rows"), FLOORS)
def test_floors_are_those_of_the_targets(shape: str, rows: int) -> None:
    floor = 1000 * SHAPES[shape].floor_seconds(rows, 1028, BANDWIDTH)
    assert floor == pytest.approx(FLOORS[shape, rows], abs=0.06)
    assert floor < STEP_TARGETS[shape, rows]


def test_sizes_are_those_of_the_named_models() -> None:
    large, small = SHAPES[LARGE], SHAPES[SMALL]
    assert large.kv_bytes_per_token == 147_456
    assert large.layer_weights + 2 * large.head_weights == pytest.approx(8.19e9, rel=0.001)
    assert small.layer_weights + small.head_weights == pytest.approx(134.5e6, rel=0.001)
    assert large.prompt_flops(2048) == 2 * (2048 * large.layer_weights + large.head_weights)
    assert (large.model.qk_norm, small.model.qk_norm) == ("head", None)
    assert set(large.model.layer_windows) == {None}
    assert large.model.eos_token_ids == ()


def of(*values: float) -> Samples:
    return Samples(values)


def history(shape: str, rows: int, ratio: float) -> History:
    return History(shape, rows, 2000, 10**6, of(1.0), of(ratio))


def prompt(flops: int) -> Prompt:
    return Prompt.of(LARGE, 2048, of(0.1), flops, PRODUCTS)


def runtime(shape: str, sampling: str, speed: float, peaks: tuple[int, ...] = (100, 100)) -> RuntimeRow:
    return RuntimeRow(shape, 256, sampling, of(speed, speed), of(speed / 2), 25_600.0, 1000.0, peaks)


def memory(**used: int | None) -> Memory:
    planned = PlannedMemory(700 * MIB, 200 * MIB, 60 * MIB, 40 * MIB)
    return Memory(LARGE, 256, "fast", planned, 5000 * MIB, UsedMemory(**used))


def kernel(timings: dict[str, KernelTiming], flops: int | None = None) -> Kernel:
    return Kernel(LARGE, "decode_attention", "1 row, 16 splits", 4_232_192, flops, 1e-6, timings)


BOTH_KERNELS = {
    "triton": KernelTiming.of(of(1.25e-6, 9e-6, 1e-6), 1e-6, captured=True),
    "torch": KernelTiming.of(of(1e-3), 1e-6, captured=False),
}


def full_results(**changes: Any) -> GpuResults:
    """Everything measured, and everything just good enough."""
    results = GpuResults(
        machine=Machine("H200", copy_bytes_per_second=BANDWIDTH, product_flops_per_second=PRODUCTS),
        steps=[
            Step(shape, rows, "triton", of(target / 1000), FLOORS[shape, rows] / 1000)
            for (shape, rows), target in STEP_TARGETS.items()
        ],
        history=[history(LARGE, 64, 1.01), history(SMALL, 256, 1.01)],
        prompt=[prompt(40 * 10**12)],
        exact=[Exact(LARGE, 64, of(1.0, 1.0), of(1.1, 1.1))],
        identity=[Identity(LARGE, "one of 64", 8, identical=True)],
        runtime=[
            runtime(LARGE, GREEDY, 23_100.0),
            runtime(SMALL, GREEDY, 23_100.0),
            runtime(SMALL, SEEDED, 1.0),
        ],
        kernels=[kernel(BOTH_KERNELS)],
        transformers=[
            Peer(SMALL, 1, OURS, of(150.0)),
            Peer(SMALL, 1, "generate", of(10.0, 15.0)),
            Peer(SMALL, 64, OURS, of(10_000.0)),
            Peer(SMALL, 64, "generate", of(1000.0)),
            Peer(SMALL, 64, "generate_batch", of(700.0)),
        ],
        parity=[Parity("m", 16, 64, 64, identical=True)],
        memory=[memory(earlier=MIB, opened=990 * MIB, stepped=1000 * MIB)],
    )
    return replace(results, **changes)


def verdicts(results: GpuResults) -> dict[str, Gate]:
    return {gate.name: gate for gate in gpu_gates(results)}


def test_what_is_just_good_enough_passes_every_gate() -> None:
    gates = gpu_gates(full_results())
    assert [gate.name for gate in gates if gate.passed is not True] == []
    assert len({gate.name for gate in gates}) == len(gates) == 6 + 3 + 2 + 1 + 1 + 1 + 4 + 2 + 1 + 1


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        (
            {"steps": [Step(LARGE, 64, "triton", of(0.0076), 0.0076 * 0.74)]},
            ["qwen3-8b, 64 sessions: step, ms", "qwen3-8b, 64 sessions: floor over step"],
        ),
        (
            {"history": [history(SMALL, 256, 1.02)]},
            ["smollm2-135m, 256 sessions: step at 1,000,000 over 2,000"],
        ),
        ({"prompt": [prompt(39 * 10**12)]}, ["qwen3-8b: prompt, share of the product rate"]),
        ({"exact": [Exact(LARGE, 64, of(1.0), of(1.2))]}, ["qwen3-8b, 64 sessions: exact step over fast"]),
        (
            {"identity": [Identity(LARGE, "a", 8, identical=True), Identity(LARGE, "b", 8, identical=False)]},
            ["exact: same bits alone, among others, cut"],
        ),
        (
            {"runtime": [runtime(LARGE, GREEDY, 23_000.0)]},
            ["qwen3-8b, 256 sessions: runtime over bare steps"],
        ),
        (
            {"runtime": [runtime(SMALL, GREEDY, 25_000.0, (100, 102))]},
            ["smollm2-135m, 256 sessions: device memory, last over first"],
        ),
        (
            {
                "transformers": [
                    Peer(SMALL, 64, OURS, of(90.0)),
                    Peer(SMALL, 64, "a", of(1.0)),
                    Peer(SMALL, 64, "b", of(9.1)),
                ]
            },
            ["smollm2-135m, 64 sessions: speed over transformers"],
        ),
        ({"parity": [Parity("m", 16, 64, 9, identical=False)]}, ["greedy tokens equal the CPU engine's"]),
        (
            {"memory": [memory(opened=900 * MIB), memory(opened=1001 * MIB, stepped=990 * MIB)]},
            ["memory_within_plan"],
        ),
    ],
)
def test_every_gate_can_fail(changes: dict[str, Any], failed: list[str]) -> None:
    gates = gpu_gates(full_results(**changes))
    assert [gate.name for gate in gates if gate.passed is False] == failed


def test_what_was_not_measured_says_why() -> None:
    absent = [
        Absence(Part.STEPS, LARGE, "RuntimeError: broke"),
        Absence(Part.STEPS, SMALL, "no time"),
        Absence(Part.PARITY, "all", "no model"),
    ]
    gates = verdicts(GpuResults(absent=absent, memory=[memory()]))
    assert {gate.passed for gate in gates.values()} == {None}
    assert gates["qwen3-8b, 1 session: step, ms"].reason == "RuntimeError: broke; no time"
    assert gates["greedy tokens equal the CPU engine's"].reason == "no model"
    assert "a device that tells" in gates["memory_within_plan"].reason
    unmeasured = gates["qwen3-8b: prompt, share of the product rate"]
    assert unmeasured.reason == "this shape was not measured in this run"


def test_peers_are_judged_by_what_was_measured() -> None:
    one, many = (f"smollm2-135m, {count}: speed over transformers" for count in ("1 session", "64 sessions"))
    hung = [Absence(Part.TRANSFORMERS, "generate_batch, 64 sessions", "no answer")]
    rows = full_results().transformers
    gates = verdicts(full_results(transformers=rows[:-1], absent=hung))
    assert [gates[name].passed for name in (one, many)] == [True, True]
    alone = verdicts(full_results(transformers=[rows[0], rows[2]], absent=hung))
    assert [(alone[name].passed, alone[name].reason) for name in (one, many)] == [(None, "no answer")] * 2
    theirs = verdicts(full_results(transformers=[rows[1], rows[3]]))
    assert [theirs[name].passed for name in (one, many)] == [None, None]


def test_sampling_by_seed_is_shown_and_not_judged() -> None:
    gates = verdicts(full_results(runtime=[runtime(SMALL, SEEDED, 1.0)]))
    assert gates["smollm2-135m, 256 sessions: runtime over bare steps"].passed is None


def test_a_runtime_that_was_never_full_has_no_speed() -> None:
    row = RuntimeRow(SMALL, 4, GREEDY, of(), of(9.0), 4.0, 1.0, ())
    assert row.kept is None
    assert row.memory_growth is None


def table(results: GpuResults, title: str) -> list[list[str]]:
    [found] = [each for each in show(results) if isinstance(each, Table) and each.title == title]
    return found.cells


def test_tables_show_medians_shares_and_what_there_is_none_of() -> None:
    rows = [Peer(SMALL, 1, OURS, of(100.0, 300.0, 200.0)), Peer(SMALL, 1, "generate", of(10.0, 20.0))]
    assert table(GpuResults(transformers=rows), "Beside transformers") == [
        [SMALL, "kakeya", "1", "200", "–"],
        [SMALL, "generate", "1", "20", "10.0"],
    ]
    alone = kernel({"torch": KernelTiming.of(of(2e-3), 1e-6, captured=True)}, 34_493_956_096)
    name = [LARGE, "decode_attention", "1 row, 16 splits", "4.23"]
    assert table(GpuResults(kernels=[kernel(BOTH_KERNELS), alone]), "Kernels by themselves") == [
        [*name, "–", "1.0", "1.2", "0.800", "1,000.0 (no graph)", "0.001"],
        [*name, "34.49", "1.0", "–", "–", "2,000.0", "0.001"],
    ]
    used = memory(earlier=9 * MIB, opened=900 * MIB, stepped=950 * MIB)
    planned = ["qwen3-8b", "fast", "256", "700", "200", "60", "40", "1,000"]
    assert table(GpuResults(memory=[used, memory()]), "Device memory, planned and used, MiB") == [
        [*planned, "900", "950", "0.950", "9", "5,000"],
        [*planned, "–", "–", "–", "–", "5,000"],
    ]
    assert table(full_results(), "Bare steps past the wrap")[1] == [
        LARGE, "triton", "64", "7.500", "5.800", "0.773", "7.5",
    ]  # fmt: skip
    assert table(full_results(), "Through the runtime, tokens/s")[0][-1] == "0.00 → 0.00"
    assert table(full_results(), "Measured rates")[1] == ["copy, read and write, TB/s", "4.28"]


TITLES = [
    "Measured rates",
    "Bare steps past the wrap",
    "Step and memory floor",
    "The same step at two histories",
    "A prompt block of one session",
    "What exact numerics cost",
    "Exact numerics: tokens and log-probabilities",
    "Through the runtime, tokens/s",
    "Kernels by themselves",
    "Beside transformers",
    "Greedy tokens beside the CPU engine's, float32",
    "Device memory, planned and used, MiB",
]


def test_the_page_has_a_table_for_each_part() -> None:
    results = full_results(absent=[Absence(Part.PARITY, "all", "no model")])
    assert [each.title for each in show(results)] == [*TITLES, "Not measured"]
    assert show(GpuResults()) == []
    kernels_only = GpuResults(kernels=[kernel(BOTH_KERNELS)])
    assert [each.title for each in show(kernels_only)] == ["Kernels by themselves"]
    assert gpu_gates(kernels_only) == gpu_gates(GpuResults()), "kernels are shown and not judged"


def test_the_picture_shows_steps_beside_floors() -> None:
    [chart] = [each for each in show(full_results()) if isinstance(each, Chart)]
    assert chart.picture
    assert chart.at[:2] == ["8b × 1", "8b × 64"]
    floor, step = chart.series
    assert (floor.values[0], step.values[1]) == (3.57, 7.5)


def test_results_survive_their_report() -> None:
    results = full_results(absent=[Absence(Part.PARITY, "all", "no model")], seconds={"a": 1.0})
    assert from_json(GpuResults, as_json(results)) == results


def test_committed_evidence_is_shown_as_it_was_judged() -> None:
    report = read_report(EVIDENCE)
    assert [each.title for each in shown(report)] == TITLES
    results = from_json(GpuResults, report.results)
    assert len(results.kernels) == 36
    again = {gate.name: gate for gate in GpuBench().gates(results)}
    assert again == {gate.name: gate for gate in report.gates}

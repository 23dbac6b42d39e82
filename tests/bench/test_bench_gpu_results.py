"""What `bench gpu` concludes and shows: floors, rows, gates, tables. No device."""

from typing import Any
from xml.etree import ElementTree

import pytest

from kakeya.bench.collection_page import KINDS
from kakeya.bench.gates import Gate
from kakeya.bench.gpu_page import gpu_page, gpu_picture, gpu_sections, peer_table
from kakeya.bench.gpu_results import (
    GREEDY,
    LARGE,
    MIDDLE,
    OURS,
    SEEDED,
    SMALL,
    STEP_TARGETS,
    Part,
    absence,
    empty_results,
    exact_row,
    gpu_gates,
    history_row,
    kernel_row,
    peer_row,
    prompt_row,
    runtime_row,
    step_row,
)
from kakeya.bench.gpu_shapes import SHAPES
from kakeya.bench.report import Report

BANDWIDTH, PRODUCTS = 4.28e12, 790e12
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


def runtime(shape: str, sampling: str, speed: float) -> dict[str, Any]:
    return runtime_row(
        shape,
        256,
        sampling,
        speeds=[speed, None, speed],
        whole_speeds=[speed / 2],
        step_seconds=[0.01],
        prompt_tokens_per_second=1000.0,
        peak_bytes=[100, 100],
    )


def full_results(**changes: Any) -> dict[str, Any]:
    """Everything measured, and everything just good enough."""
    rates = {"copy_bytes_per_second": BANDWIDTH, "product_flops_per_second": PRODUCTS}
    steps = [
        step_row(shape, rows, "triton", [target / 1000], FLOORS[shape, rows] / 1000)
        for (shape, rows), target in STEP_TARGETS.items()
    ]
    measured = {
        "machine": {"name": "H200", **rates},
        "steps": steps,
        "history": [history_row(shape, rows, {2000: [1.0], 10**6: [1.01]}) for shape, rows in HISTORIES],
        "prompt": [prompt_row(LARGE, 2048, [0.1], 40 * 10**12, PRODUCTS)],
        "exact": [exact_row(LARGE, 64, [1.0, 1.0], [1.1, 1.1])],
        "identity": [{"shape": LARGE, "how": "one of 64", "tokens": 8, "identical": True}],
        "runtime": [
            runtime(LARGE, GREEDY, 23_100.0),
            runtime(SMALL, GREEDY, 23_100.0),
            runtime(SMALL, SEEDED, 1.0),
        ],
        "kernels": [
            kernel_row(
                LARGE,
                "gated",
                "256 rows",
                moved_bytes=18_874_368,
                flops=None,
                floor_seconds=4.4e-6,
                seconds={"triton": [1.0]},
                captured={"triton"},
            )
        ],
        "transformers": [
            peer_row(SMALL, 1, OURS, [150.0]),
            peer_row(SMALL, 1, "generate", [10.0, 15.0]),
            peer_row(SMALL, 64, OURS, [10_000.0]),
            peer_row(SMALL, 64, "generate", [1000.0]),
            peer_row(SMALL, 64, "generate_batch", [700.0]),
        ],
        "parity": [
            {"model": "m", "prompt_tokens": 16, "tokens": 64, "equal_tokens": 64, "identical": True},
        ],
        "memory": [
            {
                "shape": LARGE,
                "sessions": 256,
                "numerics": "fast",
                "planned": {"weights": 70, "workspace": 15, "graphs": 10, "moves": 5, "total": 100},
                "pool": 1000,
                "used": {"earlier": 1, "opened": 99, "stepped": 100},
            },
        ],
    }
    return empty_results() | measured | changes


HISTORIES = ((LARGE, 64), (SMALL, 256))


def verdicts(results: dict[str, Any]) -> dict[str, Gate]:
    return {gate.name: gate for gate in gpu_gates(results)}


def test_what_is_just_good_enough_passes_every_gate() -> None:
    gates = gpu_gates(full_results())
    assert [gate.name for gate in gates if gate.passed is not True] == []
    assert len({gate.name for gate in gates}) == len(gates) == 6 + 3 + 2 + 1 + 1 + 1 + 4 + 2 + 1 + 1


@pytest.mark.parametrize(
    ("changes", "failed"),
    [
        (
            {"steps": [step_row(LARGE, 64, "triton", [0.0076], 0.0076 * 0.74)]},
            ["qwen3-8b, 64 sessions: step, ms", "qwen3-8b, 64 sessions: floor over step"],
        ),
        (
            {"history": [history_row(SMALL, 256, {2000: [1.0], 10**6: [1.02]})]},
            ["smollm2-135m, 256 sessions: step at 1,000,000 over 2,000"],
        ),
        (
            {"prompt": [prompt_row(LARGE, 2048, [0.1], 39 * 10**12, PRODUCTS)]},
            ["qwen3-8b: prompt, share of the product rate"],
        ),
        ({"exact": [exact_row(LARGE, 64, [1.0], [1.2])]}, ["qwen3-8b, 64 sessions: exact step over fast"]),
        (
            {"identity": [{"identical": True}, {"identical": False}]},
            ["exact: same bits alone, among others, cut"],
        ),
        (
            {"runtime": [runtime(LARGE, GREEDY, 23_000.0)]},
            ["qwen3-8b, 256 sessions: runtime over bare steps"],
        ),
        (
            {"runtime": [runtime(SMALL, GREEDY, 25_000.0) | {"memory_growth": 1.02}]},
            ["smollm2-135m, 256 sessions: device memory, last over first"],
        ),
        (
            {
                "transformers": [
                    peer_row(SMALL, 64, OURS, [90.0]),
                    peer_row(SMALL, 64, "a", [1.0]),
                    peer_row(SMALL, 64, "b", [9.1]),
                ]
            },
            ["smollm2-135m, 64 sessions: speed over transformers"],
        ),
        ({"parity": [{"identical": False}]}, ["greedy tokens equal the CPU engine's"]),
    ],
)
def test_every_gate_can_fail(changes: dict[str, Any], failed: list[str]) -> None:
    gates = gpu_gates(full_results(**changes))
    assert [gate.name for gate in gates if gate.passed is False] == failed


def test_what_was_not_measured_says_why() -> None:
    results = empty_results()
    results["absent"] = [
        absence(Part.STEPS, LARGE, "RuntimeError: broke"),
        absence(Part.STEPS, SMALL, "no time"),
        absence(Part.PARITY, "all", "no model"),
    ]
    gates = verdicts(results)
    assert {gate.passed for gate in gates.values()} == {None}
    assert gates["qwen3-8b, 1 session: step, ms"].reason == "RuntimeError: broke; no time"
    assert gates["greedy tokens equal the CPU engine's"].reason == "no model"
    assert (
        gates["qwen3-8b: prompt, share of the product rate"].reason
        == "this shape was not measured in this run"
    )


def test_peers_are_judged_by_what_was_measured() -> None:
    one, many = (f"smollm2-135m, {count}: speed over transformers" for count in ("1 session", "64 sessions"))
    hung = [absence(Part.TRANSFORMERS, "generate_batch, 64 sessions", "no answer")]
    rows = full_results()["transformers"]
    gates = verdicts(full_results(transformers=rows[:-1], absent=hung))
    assert [gates[name].passed for name in (one, many)] == [True, True]
    alone = verdicts(full_results(transformers=[rows[0], rows[2]], absent=hung))
    assert [(alone[name].passed, alone[name].reason) for name in (one, many)] == [(None, "no answer")] * 2
    theirs = verdicts(full_results(transformers=[rows[1], rows[3]]))
    assert [theirs[name].passed for name in (one, many)] == [None, None]


def test_the_table_shows_our_median_and_their_best() -> None:
    rows = [peer_row(SMALL, 1, OURS, [100.0, 300.0, 200.0]), peer_row(SMALL, 1, "generate", [10.0, 20.0])]
    assert peer_table(rows).rows == [
        (SMALL, "kakeya", "1", "200", "–"),
        (SMALL, "generate", "1", "20", "10.0"),
    ]


def test_sampling_by_seed_is_shown_and_not_judged() -> None:
    gates = verdicts(full_results(runtime=[runtime(SMALL, SEEDED, 1.0)]))
    assert gates["smollm2-135m, 256 sessions: runtime over bare steps"].passed is None


def test_a_runtime_that_was_never_full_has_no_speed() -> None:
    row = runtime_row(
        SMALL, 4, GREEDY, speeds=[None], whole_speeds=[9.0], step_seconds=[1.0],
        prompt_tokens_per_second=1.0, peak_bytes=[],
    )  # fmt: skip
    assert row["kept"] is None
    assert row["memory_growth"] is None
    assert row["bare_tokens_per_second"] == 4


def test_the_page_has_a_table_for_each_part() -> None:
    results = full_results(absent=[absence(Part.PARITY, "all", "no <model>")])
    titles = [section.table.title for section in gpu_sections(results)]
    assert titles == [
        "Measured rates",
        "Bare steps past the wrap",
        "The same step at two histories",
        "A prompt block of one session",
        "What exact numerics cost",
        "Exact numerics: tokens and log-probabilities",
        "Through the runtime, tokens/s",
        "Kernels by themselves",
        "Beside transformers",
        "Greedy tokens beside the CPU engine's, float32",
        "Device memory, planned and used, MiB",
        "Not measured",
    ]
    page = gpu_page(Report("gpu", {}, {"cpu": "any", "os": "any"}, results))
    assert 'aria-label="Step and memory floor"' in page
    assert "no &lt;model&gt;" in page
    assert "0.00 → 0.00" in page
    assert gpu_sections(empty_results()) == []


def test_the_picture_shows_steps_beside_floors() -> None:
    drawn = KINDS["gpu"].picture
    assert drawn is gpu_picture
    root = ElementTree.fromstring(gpu_picture(full_results()))
    hints = [title.text for title in root.iter("{http://www.w3.org/2000/svg}title")]
    assert "step, 8b × 64: 7.5 ms" in hints
    assert "floor, 8b × 1: 3.57 ms" in hints
    with pytest.raises(IndexError):
        gpu_picture(empty_results())

"""What shapes take of their device beside what was planned: metered, judged, shown."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kakeya.bench import gpu, gpu_memory, gpu_rig
from kakeya.bench.gpu import GpuBench, run
from kakeya.bench.gpu_memory import MemoryMeter
from kakeya.bench.gpu_page import gpu_sections, memory_table
from kakeya.bench.gpu_plan import QUICK
from kakeya.bench.gpu_results import Part, empty_results, gpu_gates, memory_share
from kakeya.bench.gpu_rig import RigKey, Workshop
from kakeya.bench.gpu_shapes import TINY_LLAMA, TINY_QWEN3

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
PLANNED = {"weights": 400, "workspace": 300, "graphs": 200, "moves": 100}
MIB = 2**20


def test_a_meter_counts_what_is_gone_without_the_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([10_000, 8_500, 8_100, 8_300])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 20_000))
    meter = MemoryMeter(CUDA, earlier=7, planned=PLANNED, pool_bytes=1000)
    meter.note_opened()
    meter.note_stepped()
    meter.note_stepped()
    assert meter.figures() == {
        "planned": {"weights": 400, "workspace": 300, "graphs": 200, "moves": 100, "total": 1000},
        "pool": 1000,
        "used": {"earlier": 7, "opened": 500, "stepped": 900},
    }


def test_a_device_that_does_not_tell_leaves_the_plan_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(
        GpuBench(device="cpu", quick=True, parts=frozenset({Part.EXACT})), lambda *_: None, lambda _: None
    )
    rows = report.results["memory"]
    assert [(row["shape"], row["sessions"], row["numerics"]) for row in rows] == [
        (QUICK.large, 4, "fast"),
        (QUICK.large, 4, "exact"),
    ]
    assert all(row["planned"]["total"] > row["planned"]["weights"] > 0 for row in rows)
    assert [row["used"] for row in rows] == [{"earlier": None, "opened": None, "stepped": None}] * 2
    assert [gate.passed for gate in report.gates if gate.name == "memory_within_plan"] == [None]


class Device:
    """A make-believe device's memory: what is open, and what each look finds gone beside."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gone = 0
        for module in (gpu_memory, gpu_rig):
            monkeypatch.setattr(module, "free_bytes", lambda device: 10**9 - self.gone)


def test_each_rig_is_metered_while_it_is_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    device, one, other = Device(monkeypatch), RigKey(TINY_LLAMA.name, 4), RigKey(TINY_QWEN3.name, 2)
    opened = Workshop._opened

    def opening(shop: Workshop, *args: Any) -> Any:
        device.gone += 10 * MIB
        return opened(shop, *args)

    monkeypatch.setattr(Workshop, "_opened", opening)
    with Workshop(CPU, QUICK) as shop:
        device.gone = MIB  # libraries, by what was done before
        shop.rigs([one])
        device.gone += 2 * MIB
        shop.note_memory()
        shop.rigs([one, other])
        device.gone += 3 * MIB
        shop.note_memory()
        first, second = shop.memory()
        assert first["pool"] == shop.rigs([one])[0].backend.pool.storage.nbytes
    used = [{when: row["used"][when] for when in ("earlier", "opened", "stepped")} for row in (first, second)]
    assert used == [
        {"earlier": MIB, "opened": 10 * MIB - first["pool"], "stepped": 12 * MIB - first["pool"]},
        {"earlier": None, "opened": 10 * MIB - second["pool"], "stepped": 13 * MIB - second["pool"]},
    ]
    assert first["pool"] == second["pool"] > 0, "four slabs of one head, two slabs of two"


def test_what_takes_memory_of_its_own_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Part] = []
    monkeypatch.setattr(Workshop, "note_memory", lambda shop: looks.append(current[0]))
    current = [Part.MACHINE]
    done = gpu._done

    def noting(job: Any, *args: Any) -> Any:
        current[0] = job.part
        return done(job, *args)

    monkeypatch.setattr(gpu, "_done", noting)
    jobs = [SimpleNamespace(part=part, work="any", seconds=0.0, measure=lambda *_: {}) for part in Part]
    monkeypatch.setattr(GpuBench, "jobs", jobs)
    run(GpuBench(device="cpu", quick=True), lambda *_: None, lambda _: None)
    assert looks == [part for part in Part if part not in (Part.KERNELS, Part.TRANSFORMERS)]


def row(**used: int | None) -> dict[str, Any]:
    planned = {"weights": 700 * MIB, "workspace": 200 * MIB, "graphs": 60 * MIB, "moves": 40 * MIB}
    return {
        "shape": "qwen3-8b",
        "sessions": 256,
        "numerics": "fast",
        "planned": planned | {"total": 1000 * MIB},
        "pool": 5000 * MIB,
        "used": {"earlier": None, "opened": None, "stepped": None} | used,
    }


@pytest.mark.parametrize(
    ("rows", "passed"),
    [
        ([], None),
        ([row()], None),
        ([row(opened=900 * MIB), row(opened=800 * MIB, stepped=1000 * MIB)], True),
        ([row(opened=900 * MIB), row(opened=1001 * MIB, stepped=990 * MIB)], False),
    ],
)
def test_the_worst_shape_is_judged(rows: list[dict[str, Any]], passed: bool | None) -> None:
    gates = {gate.name: gate for gate in gpu_gates(empty_results() | {"memory": rows})}
    assert gates["memory_within_plan"].passed is passed
    assert gates["memory_within_plan"].limit == 1.0


def test_the_table_shows_the_plan_and_what_became_of_it() -> None:
    shown = memory_table([row(earlier=9 * MIB, opened=900 * MIB, stepped=950 * MIB), row()])
    assert shown.rows == [
        ("qwen3-8b", "fast", "256", "700", "200", "60", "40", "1,000", "900", "950", "0.950", "9", "5,000"),
        ("qwen3-8b", "fast", "256", "700", "200", "60", "40", "1,000", "–", "–", "–", "–", "5,000"),
    ]
    assert memory_share(row()) is None


def test_a_report_of_an_older_version_has_no_such_table() -> None:
    results = empty_results()
    del results["memory"]
    assert gpu_sections(results) == []

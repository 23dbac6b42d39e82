"""`bench speculation --rtt-sweep`: the curve, its break-even and gates, and a run on real processes."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kakeya.bench import rtt_sweep
from kakeya.bench.processes import Server, ServerProcess, running_server, server_process
from kakeya.bench.registry import shown
from kakeya.bench.report import Report, as_json
from kakeya.bench.rtt_sweep import Curve, Distance, curves
from kakeya.bench.runner import main_chart
from kakeya.bench.speculation import NOT_MEASURED, TIES, Speculation, SpeculationResults
from kakeya.bench.stats import Samples
from kakeya.bench.tables import Table
from kakeya.errors import ConfigError
from kakeya.options import EngineOptions
from kakeya.types import BackendChoice


def at(rtt_ms: int, ahead: float, needed: float = 1.0, **changes: Any) -> Distance:
    given = {"accepted": 30, "proposed": 40, "tokens": 90, "same": 1.0, "co_located": Samples((15.0,))}
    speeds = [Samples((10.0,)), Samples((10.0 * ahead,)), Samples((10.0 * needed,))]
    return Distance("ngram", "code", rtt_ms, *speeds, **(given | changes))


def gates_of(*rows: Distance, share: float = 0.0) -> list[bool | None]:
    bench = Speculation(rtt_sweep=True)
    return [gate.passed for gate in bench.gates(SpeculationResults([], list(rows), bystanders_share=share))]


@pytest.mark.parametrize(
    "speeds, expected",
    [
        ({0: 1.5, 50: 1.2, 100: 0.8}, 75.0),
        ({0: 1.5, 100: 1.0}, 100.0),
        ({0: 0.9, 100: 1.2}, None),
        ({}, None),
    ],
)
def test_where_it_ceases_to_gain(speeds: dict[int, float], expected: float | None) -> None:
    even = Curve([at(*point) for point in speeds.items()]).break_even_ms
    assert even is None if expected is None else even == pytest.approx(expected)


def test_a_row_knows_its_figures() -> None:
    row = at(5, 1.5, 1.2)
    assert (row.speedup_ahead, row.speedup_when_needed) == (pytest.approx(1.5), pytest.approx(1.2))
    assert (row.speedup_co_located, row.of_co_located) == (pytest.approx(1.5), pytest.approx(1.0))
    assert (row.acceptance, row.tokens_a_step) == (0.75, 1.5)
    assert at(5, 1.0, proposed=0).acceptance is None


def test_the_distance_may_cost_little() -> None:
    assert gates_of(at(0, 1.5), at(5, 1.4), at(150, 1.0)) == [True, True, True, True, True]
    slow_relay = gates_of(at(0, 1.0), at(5, 1.0), at(150, 1.0))
    assert slow_relay == [False, True, True, True, True], "at no distance it is as slow"
    assert gates_of(at(5, 1.4, co_located=Samples()))[0] is None, "as in reports from before it was measured"
    assert gates_of(at(0, 1.5), at(5, 1.3), at(60, 0.9, same=0.5)) == [False, False, False, False, True]
    assert gates_of(at(0, 1.5), share=0.5) == [None, None, None, True, False]
    assert gates_of() == [None, None, None, None, True]
    in_fast = Speculation(rtt_sweep=True, backend=BackendChoice.CUDA)
    *_, same, _ = in_fast.gates(SpeculationResults([], [at(0, 1.5, same=0.5)], bystanders_share=0.0))
    assert (same.passed, same.reason) == (None, TIES)
    reasons = [gate.reason for gate in rtt_sweep.gates([], None, NOT_MEASURED)]
    assert reasons[0] == NOT_MEASURED


def test_what_is_shown() -> None:
    results = SpeculationResults([], [at(0, 1.5, 1.4), at(100, 0.5)])
    table, chart = Speculation.show(results)
    assert isinstance(table, Table)
    assert table.cells[0][2:5] == ["0", "10.0", "15.0"]
    assert main_chart([chart]) is chart
    assert chart.mark == (50.0, "break-even 50 ms")
    assert [series.values for series in chart.series] == [[1.5, 0.5], [1.4, 1.0]]
    again = shown(Report("speculation", {}, {}, as_json(results)))[0]
    assert isinstance(again, Table)
    assert again.cells == table.cells
    assert Speculation.show(SpeculationResults([], [at(0, 0.9)]))[1].mark is None
    assert len(curves([at(0, 1.0), at(0, 1.0, same=0.0)])) == 1


def test_settings() -> None:
    with pytest.raises(ConfigError, match="rtts must not be below 0"):
        Speculation(rtts="-1")
    with pytest.raises(ConfigError, match="rtts must be whole numbers"):
        Speculation(rtts="near")
    assert Speculation().presets() == {}
    assert Speculation(rtt_sweep=True).presets()["kinds"] == "code"
    assert Speculation(rtt_sweep=True, quick=True).presets()["rtts"] == "0,15"


def test_one_core_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {3})
    assert rtt_sweep._halves() == ([3], [3])
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    assert rtt_sweep._halves() == ([0], [1, 2])


@pytest.mark.slow
def test_real_processes_answer_alike_at_every_distance(
    tiny: dict[str, Any],
    tiny_server: ServerProcess,
    measure: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The plain server is the one that is there, and one drafting server stands for all."""
    drafting: list[Server] = []

    @asynccontextmanager
    async def started(engine: EngineOptions, *settings: Any, **more: Any) -> AsyncIterator[Server]:
        if engine.proposer == "none":
            async with running_server(tiny_server.address, tiny_server.http_address, tiny_server.pid) as it:
                yield it
        elif drafting:
            yield drafting[0]
        else:
            async with server_process(engine, *settings, **more) as it:
                drafting.append(it)
                yield it

    monkeypatch.setattr(rtt_sweep, "server_process", started)
    wanted = {"kinds": "copy", "temperatures": "0", "sessions": "1", "rtts": "0,20"}
    bench = Speculation(**(tiny | wanted), rtt_sweep=True, max_tokens=24, repeats=1)
    measured = measure(bench)
    rows = measured.results.distances
    assert [row.rtt_ms for row in rows] == [0, 20]
    assert {row.same for row in rows} == {1.0}
    assert all(row.speedup_ahead and row.speedup_when_needed and row.of_co_located for row in rows)
    assert len(measured.checkpoints) == 2
    assert drafting[0].info.proposer.startswith("remote:127.0.0.1:")

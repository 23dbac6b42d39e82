"""`bench speculation`: what is concluded and shown, and a run on real servers."""

from collections.abc import Callable
from typing import Any

import pytest

from kakeya.bench.registry import shown
from kakeya.bench.report import Report, as_json
from kakeya.bench.runner import main_chart
from kakeya.bench.speculation import NOT_MEASURED, TIES, Speculation, SpeculationResults, Speedup
from kakeya.bench.stats import Samples
from kakeya.bench.tables import Table
from kakeya.errors import ConfigError
from kakeya.types import BackendChoice, KernelChoice, Numerics


def a_row(proposer: str = "ngram", kind: str = "copy", speedup: float = 2.0, **changes: Any) -> Speedup:
    given = {"temperature": 0.0, "sessions": 1, "tokens": 100, "proposed": 80, "accepted": 60}
    shares = {"ended": 0.5, "same": 1.0, "plain": Samples((50.0, 100.0))}
    drafted = Samples((50.0 * speedup, 100.0 * speedup))
    return Speedup(proposer, kind, **(given | shares | {"drafted": drafted} | changes))


def gates_of(*rows: Speedup, share: float = 0.0, **settings: Any) -> dict[str, Any]:
    bench = Speculation(**settings)
    return {gate.name: gate for gate in bench.gates(SpeculationResults(list(rows), bystanders_share=share))}


def test_a_row_knows_its_figures() -> None:
    row = a_row(speedup=1.5)
    assert row.speedup == pytest.approx(1.5)
    assert (row.acceptance, row.tokens_a_step) == (0.75, 2.5)
    assert row.label() == "ngram, copy, temperature 0, 1 session"
    assert a_row(proposed=0, accepted=0).acceptance is None


@pytest.mark.parametrize(
    "proposer, kind, enough, little", [("ngram", "copy", 1.6, 1.5), ("ngram+model:x", "code", 1.3, 1.2)]
)
def test_a_proposer_must_gain_what_it_is_for(proposer: str, kind: str, enough: float, little: float) -> None:
    name = f"{proposer}, {kind}, temperature 0, 1 session: speed over plain"
    for speedup, passed in ((enough, True), (little, False)):
        gates = gates_of(a_row(proposer, kind, speedup), proposers=proposer)
        assert gates[name].passed is passed
    assert gates_of(proposers=proposer)[name].reason == NOT_MEASURED


def test_nothing_may_become_slower_or_different() -> None:
    good = gates_of(a_row(), a_row(kind="chat", speedup=0.97))
    assert [gate.passed for gate in good.values()] == [True] * 4
    bad = gates_of(a_row(), a_row(kind="chat", speedup=0.96, same=0.9))
    assert [gate.passed for gate in bad.values()] == [True, False, False, True]


DRAFTING = {"proposers": "drafter", "backend": BackendChoice.CUDA}
ENDED = {"plain_ended": Samples((100.0,)), "drafted_ended": Samples((220.0,))}


def drafter_rows(*speedups: float, **changes: Any) -> list[Speedup]:
    cells = [(0.0, 1), (0.7, 1), (0.0, 16), (0.0, 256)]
    return [
        a_row("drafter", "chat", speedup, temperature=temperature, sessions=sessions, **(ENDED | changes))
        for (temperature, sessions), speedup in zip(cells, speedups, strict=True)
    ]


def test_a_drafter_must_gain_on_a_device() -> None:
    good = gates_of(*drafter_rows(2.5, 1.8, 1.8, 1.0), **DRAFTING)
    assert [gate.passed for gate in good.values()] == [True] * 6 + [None, True]
    bad = gates_of(*drafter_rows(2.4, 1.7, 1.7, 0.99, drafted_ended=Samples((219.0,))), **DRAFTING)
    assert [gate.passed for gate in bad.values()] == [False] * 5 + [True, None, True]
    unended = gates_of(*drafter_rows(2.5, 1.8, 1.8, 1.0, drafted_ended=Samples((0.0,))), **DRAFTING)
    (ended,) = (gate for name, gate in unended.items() if "end by themselves" in name)
    assert (ended.passed, ended.reason) == (None, "no answer ended by itself")
    assert all(gate.reason == NOT_MEASURED for gate in list(gates_of(**DRAFTING).values())[:6])


def test_a_drafter_of_ones_own_must_gain_on_code_and_on_a_device_alone() -> None:
    own = gates_of(a_row("drafter", "code", 2.4), **DRAFTING, model="qwen")
    assert own["drafter, code, temperature 0, 1 session: speed over plain"].passed is False
    assert len(own) == 4
    assert len(gates_of(a_row("drafter", "chat", 1.0), proposers="drafter")) == 3


@pytest.mark.parametrize(
    "settings, passed",
    [
        ({"backend": BackendChoice.CUDA}, None),
        ({"kernels": KernelChoice.TORCH}, None),
        ({"backend": BackendChoice.CUDA, "numerics": Numerics.EXACT}, False),
        ({"backend": BackendChoice.CPU}, False),
    ],
)
def test_answers_are_judged_where_rows_have_the_same_bits(
    settings: dict[str, Any], passed: bool | None
) -> None:
    gate = gates_of(a_row(same=0.9), **settings)["answers that are the same"]
    assert gate.passed is passed
    assert passed is False or gate.reason == TIES


def test_ratios_of_a_busy_machine_are_not_judged() -> None:
    gates = gates_of(a_row(), share=0.3)
    assert [gate.passed for gate in gates.values()] == [None, None, True, False]


def test_what_is_shown() -> None:
    rows = [a_row(), a_row(sessions=4, speedup=1.5), a_row(kind="chat"), a_row(temperature=0.7)]
    results = SpeculationResults(rows)
    table, *charts = Speculation.show(results)
    assert isinstance(table, Table)
    assert table.cells[0] == [
        "ngram", "copy", "0", "1", "75", "150", "2.00", "75%", "2.50", "50%", "–", "100%",
    ]  # fmt: skip
    assert [chart.title for chart in charts] == ["ngram, temperature 0", "ngram, temperature 0.7"]
    chart = main_chart(charts)
    assert chart is not None
    assert [(each.name, each.values) for each in chart.series] == [
        ("1 at once", [2.0, 2.0]),
        ("4 at once", [1.5, None]),
    ]
    again = shown(Report("speculation", {}, {}, as_json(results)))[0]
    assert isinstance(again, Table)
    assert again.cells == table.cells
    assert len(Speculation.show(SpeculationResults())) == 1


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"kinds": "chat,poetry"}, "kinds must be some of .* got 'poetry'"),
        ({"proposers": "none"}, "proposers are compared with none"),
        ({"proposers": "magic"}, "proposer must be"),
        ({"temperatures": "warm"}, "temperatures must be numbers"),
        ({"sessions": "many"}, "sessions must be whole numbers"),
        ({"max_tokens": 1}, "max-tokens must be at least 2"),
        ({"repeats": 0}, "repeats must be at least 1"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Speculation(**settings)


@pytest.mark.slow
def test_both_servers_answer_alike(tiny: dict[str, Any], measure: Callable[..., Any]) -> None:
    wanted = {"window": 256, "kinds": "copy,json", "temperatures": "0,1", "sessions": "1,2"}
    bench = Speculation(**(tiny | wanted), max_tokens=40, repeats=1)
    measured = measure(bench)
    rows = measured.results.rows
    assert [row.label() for row in rows] == [
        f"ngram, {kind}, temperature {temperature}, {sessions}"
        for kind in ("copy", "json")
        for temperature in (0, 1)
        for sessions in ("1 session", "2 sessions")
    ]
    assert {row.same for row in rows} == {1.0}
    assert all(row.tokens > 0 and row.speedup for row in rows)
    assert len(measured.checkpoints) == len(rows)

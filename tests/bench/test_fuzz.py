"""`bench fuzz`: its gates, and files that pretend to be sessions."""

from dataclasses import replace
from typing import Any

import pytest

from kakeya.bench import fuzz
from kakeya.bench.benchmark import Run
from kakeya.bench.fuzz import Fuzz, FuzzResults
from kakeya.bench.page import report_page
from kakeya.bench.report import Report
from kakeya.engine.state import RecallState

CLEAN = FuzzResults(damaged=50_000, forged=50_000, forged_accepted=9, longest_s=0.1, refusals={"cut": 3})


@pytest.mark.parametrize(
    ("changes", "verdicts"),
    [
        ({}, [True, True, True, True, True]),
        ({"forged": 3}, [False, True, True, True, True]),
        ({"damaged_accepted": 1}, [True, False, True, True, True]),
        ({"broken": 1}, [True, True, False, True, True]),
        ({"unexpected": ("MemoryError",)}, [True, True, True, False, True]),
        ({"longest_s": 6.0}, [True, True, True, True, False]),
        ({"damaged": 0, "forged": 0, "longest_s": None}, [False, None, None, None, None]),
    ],
)
def test_gates(changes: dict[str, Any], verdicts: list[bool | None]) -> None:
    results = replace(CLEAN, **changes)
    assert [gate.passed for gate in Fuzz().gates(results)] == verdicts
    assert "Imports" in report_page("t", Report("fuzz", {}, {}), Fuzz.show(results))


def test_no_damaged_file_is_accepted(tiny: dict[str, Any]) -> None:
    """The short version of the long one."""
    bench = Fuzz(**(tiny | {"files": 3000}))
    results = bench.run(Run())
    assert [gate.passed for gate in bench.gates(results)] == [True] * 5, results
    assert 0 < results.forged_accepted < results.forged
    assert results.refusals is not None
    assert len(results.refusals) > 10


def test_what_sessions_recall_is_changed_too(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from kakeya.engine import state

    checked: list[RecallState] = []
    check = state.check_recall

    def watched(recall: RecallState, *rest: int) -> None:
        checked.append(recall)
        check(recall, *rest)

    monkeypatch.setattr(state, "check_recall", watched)
    bench = Fuzz(**(tiny | {"files": 3000, "recall": 16}))
    results = bench.run(Run())
    assert [gate.passed for gate in bench.gates(results)] == [True] * 5, results
    assert {(bool(each.wanted), bool(each.remembered)) for each in checked} == {
        (True, True),
        (True, False),
        (False, True),
        (False, False),
    }
    assert len(set(checked)) > 20
    checked.clear()
    Fuzz(**(tiny | {"files": 20, "recall": 0})).run(Run())
    assert not checked


def test_a_reader_that_believes_everything_is_found_out(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a digest, damage is accepted; without checks, it breaks what comes later."""
    from kakeya import runtime

    monkeypatch.setattr(runtime, "contents_of", lambda file: memoryview(file)[64:])
    results = Fuzz(**(tiny | {"files": 400})).run(Run())
    assert results.damaged_accepted > 0

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(runtime, "decode_state", broken)
    results = Fuzz(**(tiny | {"files": 4})).run(Run())
    assert results.unexpected == ("RuntimeError: broken",) * 4
    assert fuzz._LONGEST_S > 0

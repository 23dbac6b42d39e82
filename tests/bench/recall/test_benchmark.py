"""`bench recall` over a tiny model: random words for answers, but every row, figure and gate."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kakeya.bench.recall.asking import BOUNDED, FULL, RECALL, RIGHT, WHOLE
from kakeya.bench.recall.benchmark import Part, RecallBench, RecallResults
from kakeya.bench.recall.material import EIGHT, ONE
from kakeya.bench.recall.rows import Asked, Harm, RecallRow, StreamCost, TurnCost
from kakeya.bench.report import as_json, from_json
from kakeya.bench.runner import main_chart
from kakeya.bench.stats import Samples
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError
from kakeya.types import DType, Numerics, WeightFormat


@dataclass(frozen=True)
class TinyBench(RecallBench):
    config: ClassVar[EngineConfig] = EngineConfig(  # type: ignore[misc]
        numerics=Numerics.EXACT, dtype=DType.FLOAT32, weights=WeightFormat.FLOAT32, threads=1
    )


@pytest.fixture(scope="module")
def measured(chat_model: Path, measure: Callable[..., Any]) -> Any:
    return measure(
        TinyBench(
            model=str(chat_model),
            window=128,
            recall=128,
            kinds=f"{ONE},never told",
            distances="512,6000",
            trials=1,
            full_tokens=512,
            whole_tokens=512,
            passages=2,
            histories="600,700",
            repeats=2,
        )
    )


def test_every_memory_is_asked_as_far_as_it_reaches(measured: Any) -> None:
    rows = measured.results.rows
    near = [row.memory for row in rows if (row.kind, row.distance) == (ONE, 512)]
    far = [row.memory for row in rows if (row.kind, row.distance) == (ONE, 6000)]
    assert set(near) - set(far) == {FULL, WHOLE}
    assert {BOUNDED, RECALL, RIGHT} <= set(far)
    found = {row.memory: row.found.share for row in rows if row.kind == ONE and row.distance == 6000}
    assert (found[RECALL], found[RIGHT], found[BOUNDED]) == (1.0, 1.0, None)
    whole = next(row for row in rows if row.memory == WHOLE and row.kind == ONE)
    assert whole.found.share == 1.0
    assert [row.memory for row in rows if row.kind.endswith("within the window")] == [BOUNDED, WHOLE]
    left_out = {row.memory: row.left_out for row in rows if row.kind == ONE}
    assert left_out[RECALL] > 1000
    assert (left_out[FULL], left_out[WHOLE]) == (0, 0)


def test_what_it_costs_is_measured(measured: Any) -> None:
    results = measured.results
    assert [each.distance for each in results.searches] == [512, 6000]
    assert 4 < results.searches[0].bytes_a_token <= 16
    assert results.harm.tokens == 128
    assert 0.5 < results.harm.ratio < 2
    short, long = results.turns
    assert (len(short.plain.samples), len(long.plain.samples)) == (6, 0)
    for turns in (short, long):
        assert len(turns.unchanged.samples) + len(turns.changed.samples) == 6
        assert turns.unchanged.samples
        assert turns.changed.samples
        assert turns.device_bytes > 0
    alone, plain, recalling = results.streams
    assert (alone.turns, len(alone.gap.samples)) == (0, 2 * 4 * 127)
    assert min(plain.turns, recalling.turns) >= 2 * 16
    assert all(each.p95 >= each.gap.median > 0 for each in results.streams)
    assert from_json(RecallResults, as_json(results)) == results
    assert measured.run.facts["text"]["file"] == "bench/data/galapagos.txt"


def row(memory: str, kind: str, right: int) -> RecallRow:
    return RecallRow(memory, kind, 1500, tuple(Asked(True, number < right, "") for number in range(100)))


def gates(results: RecallResults) -> dict[str, bool | None]:
    return {gate.name: gate.passed for gate in RecallBench().gates(results)}


@pytest.mark.parametrize(("right", "passed"), [(75, True), (74, False)])
def test_a_gate_can_fail(right: int, passed: bool) -> None:
    assert gates(RecallResults(rows=(row(RECALL, EIGHT, right),)))["one of 8 alike: right"] is passed


@pytest.mark.parametrize(("kept", "passed"), [(88, True), (87, False)])
def test_what_the_window_holds_may_not_be_lost(kept: int, passed: bool) -> None:
    kind = f"{EIGHT}, within the window"
    judged = gates(RecallResults(rows=(row(BOUNDED, kind, 90), row(WHOLE, kind, kept))))
    assert judged["right answers lost within the window"] is passed
    assert judged["one fact: found"] is None
    assert gates(RecallResults(harm=Harm(1, 0.1, 0.0)))["perplexity with recall over without"] is False


def test_latencies_are_gated() -> None:
    one, more = Samples.of([0.1]), Samples.of([0.106])
    turns = (TurnCost(1_000_000, Samples(), more, one, 1), TurnCost(1024, one, one, one, 1))
    streams = tuple(StreamCost(str(ms), Samples.of([ms / 1000]), 0) for ms in (10, 40, 49))
    judged = RecallResults(turns=turns, streams=streams)
    failing = [name for name, passed in gates(judged).items() if passed is False]
    assert failing == [
        "turn with the same pages, longest history over shortest",
        "gap of streams (p95), turns that recall over turns that do not",
    ]
    assert not any(gates(replace(judged, bystanders_share=0.2)).values())
    assert False not in gates(replace(judged, bystanders_share=0.2)).values()


def test_a_part_is_measured_by_itself(chat_model: Path, measure: Callable[..., Any]) -> None:
    bench = TinyBench(
        model=str(chat_model),
        window=128,
        recall=128,
        part=Part.ANSWERS,
        kinds=ONE,
        distances="512",
        trials=1,
        full_tokens=0,
        whole_tokens=0,
    )
    results = measure(bench).results
    assert {row.memory for row in results.rows if row.distance == 512}.isdisjoint({FULL, WHOLE})
    assert (results.harm, results.turns, results.streams) == (None, (), ())


def test_only_the_memories_that_were_named_are_asked(chat_model: Path, measure: Callable[..., Any]) -> None:
    bench = TinyBench(
        model=str(chat_model),
        window=128,
        recall=128,
        part=Part.ANSWERS,
        kinds=ONE,
        distances="512",
        trials=1,
        memories=f"{RECALL},{RIGHT}",
    )
    assert [row.memory for row in measure(bench).results.rows] == [RECALL, RIGHT]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": "one fact,magic"}, "kinds must be some of .* got 'magic'"),
        ({"memories": "recall,magic"}, "memories must be some of .* got 'magic'"),
        ({"distances": "571"}, "distances must be at least 572 tokens, .* got 571"),
        ({"histories": "600"}, "histories must outgrow"),
        ({"recall": 64}, "recall must be at least 128, got 64"),
        ({"text": Path("absent.txt")}, "cannot be read as UTF-8"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    RecallBench().check(picture=False)
    with pytest.raises(ConfigError, match=message):
        replace(RecallBench(), **changes).check(picture=False)


def test_quick_is_quick() -> None:
    quick = RecallBench(quick=True)
    replace(quick, **quick.presets()).check(picture=True)


def test_the_picture_has_every_kind_with_recall_and_the_first_without() -> None:
    rows = (row(RECALL, ONE, 9), row(BOUNDED, ONE, 0), row(RECALL, EIGHT, 8), row(BOUNDED, EIGHT, 1))
    chart = main_chart(RecallBench.show(RecallResults(rows=rows)))
    assert chart is not None
    assert [each.name for each in chart.series] == [ONE, EIGHT, f"{ONE}, {BOUNDED}"]
    assert chart.series[1].values == [rows[2].right.share]
    assert main_chart(RecallBench.show(RecallResults())) is None

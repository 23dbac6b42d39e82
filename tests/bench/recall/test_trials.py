"""Trials asked by two processes, beside the same trials asked here."""

from dataclasses import replace
from pathlib import Path

import pytest

from kakeya.bench.recall.asking import BOUNDED, RECALL, WHOLE
from kakeya.bench.recall.benchmark import RecallBench
from kakeya.bench.recall.material import ONE
from kakeya.bench.recall.rows import RecallRow
from kakeya.bench.recall.trials import trials_of
from kakeya.bench.text import prose

pytestmark = pytest.mark.slow


def test_processes_ask_what_one_asks(chat_model: Path) -> None:
    bench = RecallBench(
        model=str(chat_model),
        window=128,
        recall=128,
        memories=f"{BOUNDED},{WHOLE},{RECALL}",
        trials=3,
        full_tokens=512,
        whole_tokens=512,
        threads=1,
    )
    here, spread = (asked(replace(bench, processes=count)) for count in (1, 2))
    assert here == spread
    memories = [BOUNDED, WHOLE, RECALL, BOUNDED, WHOLE]
    assert [(row.memory, len(row.asked)) for row in here] == [(memory, 3) for memory in memories]


def asked(bench: RecallBench) -> list[RecallRow]:
    with trials_of(bench, prose()) as trials:
        rows = [*trials.cell(ONE, 512), *trials.within()]
        assert [each.distance for each in trials.searches()] == [512]
        assert len(trials.searches()[0].lookup.samples) == bench.trials
    return rows

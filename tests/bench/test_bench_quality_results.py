import math
from typing import Any

import pytest

from kakeya.bench.quality_page import quality_page, quality_table
from kakeya.bench.quality_results import (
    DEFAULT,
    REFERENCE,
    Choice,
    Tally,
    all_choices,
    choice_row,
    quality_gates,
    refused_row,
)
from kakeya.bench.report import Report
from kakeya.types import DType, KernelChoice, WeightFormat

TORCH_INT8 = Choice(DType.FLOAT32, WeightFormat.INT8, KernelChoice.TORCH)


def _tally(positions: int = 4000, kl: float = 0.001, agreement: float = 0.99) -> Tally:
    return Tally(positions, positions * kl, int(positions * agreement), positions - 1, (positions - 1) * 3.0)


def _results(tally: Tally) -> dict[str, Any]:
    rows = [
        choice_row(DEFAULT, "int4", {"prompt": tally, "decode": tally}),
        refused_row(TORCH_INT8, "no such kernel"),
    ]
    return {"reference": Tally(2, 0.0, 2, 1, 2.0).to_dict(), "choices": rows}


def test_every_combination_is_tried_once_but_the_reference() -> None:
    choices = list(all_choices())
    assert len(choices) == len(set(choices))
    assert REFERENCE not in choices
    assert choices[0] == DEFAULT
    expected = len(DType) * len(WeightFormat) * 2 - 1  # two kinds of kernels
    assert len(choices) == 1 + expected


def test_tallies_add_up_and_are_averaged() -> None:
    total = Tally(2, 0.2, 1, 1, 1.0) + Tally(6, 0.6, 5, 5, 5.0)
    scores = total.to_dict()
    assert scores["positions"] == 8
    assert scores["mean_kl"] == pytest.approx(0.1)
    assert scores["top1_agreement"] == 0.75
    assert scores["perplexity"] == pytest.approx(math.e)


def test_an_empty_tally_has_no_averages() -> None:
    scores = Tally().to_dict()
    assert scores["mean_kl"] is scores["top1_agreement"] is scores["perplexity"] is None


def test_defaults_close_to_the_reference_pass() -> None:
    assert [gate.passed for gate in quality_gates(_results(_tally()))] == [True, True]


def test_defaults_far_from_the_reference_fail() -> None:
    gates = quality_gates(_results(_tally(kl=0.5, agreement=0.5)))
    assert [gate.passed for gate in gates] == [False, False]


def test_too_little_text_is_not_judged() -> None:
    gates = quality_gates(_results(_tally(positions=1999)))
    assert [gate.passed for gate in gates] == [None, None]
    assert "1,999" in gates[0].reason


def test_without_the_default_choice_nothing_is_judged() -> None:
    results = _results(_tally()) | {"choices": [refused_row(DEFAULT, "cannot")]}
    assert [gate.passed for gate in quality_gates(results)] == [None, None]
    assert [gate.passed for gate in quality_gates(results | {"choices": []})] == [None, None]


def test_table_has_the_reference_the_choices_and_the_refusals() -> None:
    rows = quality_table(_results(_tally())).rows
    assert rows[0][:4] == ("float32", "float32", "torch", "the reference")
    assert rows[1] == ("bfloat16", "auto", "auto", "int4", "1.00e-03", "1.00e-03", "99.00%", "20.086")
    assert rows[2][3] == "not here: no such kernel"
    unscored = _results(Tally())
    assert quality_table(unscored).rows[1][4:] == ("–", "–", "–", "–")


def test_page_draws_what_was_measured() -> None:
    page = quality_page(Report("quality", {}, {"cpu": "c", "os": "o"}, _results(_tally())))
    assert page.count("<svg") == 1
    assert "decode, auto: 0.001 mean KL" in page

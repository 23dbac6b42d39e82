"""The part choices: what it concludes and shows."""

import math

import pytest
import torch

from kakeya.bench.quality.choices import (
    DEFAULT,
    REFERENCE,
    ChoiceResults,
    ChoiceRow,
    Scores,
    choices_to_try,
    compare,
)
from kakeya.types import DType, KernelChoice, WeightFormat

REFUSED = ChoiceRow(DType.FLOAT32, WeightFormat.INT8, KernelChoice.TORCH, refused="no such kernel")


def chosen(positions: int = 4000, kl: float | None = 0.001, agreement: float | None = 0.99) -> ChoiceRow:
    scores = Scores(positions, kl, agreement, math.exp(3))
    return ChoiceRow(**vars(DEFAULT), held_as="int4", prompt=scores, decode=scores)


def test_every_combination_is_tried_once_but_the_reference() -> None:
    choices = choices_to_try(only_default=False)
    assert len(choices) == len(set(choices)) == 1 + len(DType) * len(WeightFormat) * 2 - 1  # two kernels
    assert REFERENCE not in choices
    assert choices[:1] == choices_to_try(only_default=True) == [DEFAULT]


def test_comparison_is_the_textbook_formula() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]])
    passage = ([0, 2], p.log())
    expected = 0.5 * math.log(2.0) - 0.25 * math.log(2.0) + 0.1 * math.log(0.5) + 0.8 * math.log(8 / 7)
    for times in (1, 2):  # passages add up, and means stay
        scores = compare([passage] * times, [q.log() + 3.0] * times)  # logits are free up to a constant
        assert (scores.positions, scores.top1_agreement) == (2 * times, 0.5)
        assert scores.mean_kl == pytest.approx(expected / 2, rel=1e-5)
        assert scores.perplexity == pytest.approx(4.0, rel=1e-5)
    same = compare([passage], [p.log()])
    assert (same.mean_kl, same.top1_agreement) == (pytest.approx(0.0, abs=1e-6), 1.0)
    assert compare([([0], p[:1].log())], [q[:1].log()]).perplexity is None, "a lone token"
    assert compare([], []) == Scores()


@pytest.mark.parametrize(
    ("rows", "passed", "reason"),
    [
        ([REFUSED, chosen()], True, ""),
        ([chosen(kl=0.0101, agreement=0.949)], False, ""),
        ([chosen(positions=1999)], None, "needs 2,000 positions, got 1,999"),
        ([ChoiceRow(**vars(DEFAULT), refused="cannot")], None, "got 0"),
        ([], None, "got 0"),
    ],
)
def test_defaults_must_be_close_to_the_reference(
    rows: list[ChoiceRow], passed: bool | None, reason: str
) -> None:
    kl, agreement = ChoiceResults(Scores(2), rows).gates()
    assert (kl.name, agreement.name) == (
        "mean KL divergence of the default choice",
        "top-1 agreement of the default choice",
    )
    assert kl.passed is agreement.passed is passed
    assert reason in kl.reason


def test_choices_are_shown_with_the_reference_and_the_refusals() -> None:
    unscored = ChoiceRow(**vars(DEFAULT), held_as="int4", prompt=Scores(), decode=Scores())
    results = ChoiceResults(Scores(2, 0.0, 1.0, math.e), (chosen(), REFUSED, unscored))
    table, chart = results.show()
    assert table.cells == [
        ["float32", "float32", "torch", "the reference", "0.00e+00", "0.00e+00", "100.00%", "2.718"],
        ["bfloat16", "auto", "auto", "int4", "1.00e-03", "1.00e-03", "99.00%", "20.086"],
        ["float32", "int8", "torch", "not here: no such kernel", "–", "–", "–", "–"],
        ["bfloat16", "auto", "auto", "int4", "–", "–", "–", "–"],
    ]
    assert chart.at == ["auto", "auto"]
    assert [(series.name, series.values) for series in chart.series] == [
        ("decode", [0.001, None]),
        ("prompt", [0.001, None]),
    ]

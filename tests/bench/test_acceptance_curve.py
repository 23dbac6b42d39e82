"""`bench speculation --acceptances`: the curve, its gates, and a run over tiny random weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kakeya.bench.acceptance_curve import LARGE, Gain, gates
from kakeya.bench.gpu.foretold import Foretold, SureCheckpoint
from kakeya.bench.gpu.shapes import SHAPES
from kakeya.bench.registry import shown
from kakeya.bench.report import Report, as_json
from kakeya.bench.runner import main_chart
from kakeya.bench.speculation import NOT_MEASURED, Speculation, SpeculationResults
from kakeya.bench.stats import Samples
from kakeya.bench.tables import Chart, Table
from kakeya.config import CacheConfig, EngineConfig
from kakeya.engine.proposer import DraftRequest
from kakeya.errors import ConfigError
from kakeya.runtime import Runtime
from kakeya.types import KernelChoice, SamplingParams, TokenEvent


def gain(acceptance: float, blocks: float, as_it_pays: float = 1.0, **changes: Any) -> Gain:
    given = {"model": "tiny", "sessions": 1, "proposed": 80, "accepted": 60, "tokens": 90, "same": 1.0}
    speeds = {"plain": 10.0, "blocks": 10.0 * blocks, "as_it_pays": 10.0 * as_it_pays}
    samples = {way: Samples((speed,)) for way, speed in speeds.items()}
    return Gain(**(given | samples | {"acceptance": acceptance} | changes))


def test_a_row_knows_its_figures() -> None:
    row = gain(0.8, 2.5, 2.4)
    assert (row.blocks_speedup, row.as_it_pays_speedup) == (pytest.approx(2.5), pytest.approx(2.4))
    assert row.tokens_a_step == 3.0


def test_what_is_demanded() -> None:
    assert [gate.passed for gate in gates([gain(0.0, 0.5, 0.97)], None, NOT_MEASURED)] == [True, True]
    slow = [gain(0.0, 0.5, 0.9, same=0.5)]
    assert [gate.passed for gate in gates(slow, None, NOT_MEASURED)] == [False, False]
    assert [gate.passed for gate in gates(slow, "others", NOT_MEASURED)] == [None, False]
    large = [gain(0.8, 3.1, model=LARGE), gain(0.8, 1.9, model=LARGE, sessions=64)]
    assert [gate.passed for gate in gates(large, None, NOT_MEASURED)] == [True, False, True, True]
    alone = list(gates(large[:1], None, NOT_MEASURED))
    assert [(gate.passed, gate.reason) for gate in alone[1:2]] == [(None, NOT_MEASURED)]


def test_what_is_shown() -> None:
    rows = [gain(0.5, 1.5, 1.4), gain(1.0, 4.0, 3.9), gain(0.5, 1.2, 1.1, sessions=4)]
    results = SpeculationResults(gains=rows)
    table, *charts = Speculation.show(results)
    assert isinstance(table, Table)
    assert table.cells[0][:3] == ["tiny", "1", "0.5"]
    assert table.cells[0][6:8] == ["1.50", "1.40"]
    chart = main_chart(charts)
    assert isinstance(chart, Chart)
    assert chart.at == [0.5, 1.0]
    assert [series.values for series in chart.series] == [[1.5, 4.0], [1.4, 3.9]]
    assert len(charts) == 2
    again = shown(Report("speculation", {}, {}, as_json(results)))[0]
    assert isinstance(again, Table)
    assert again.cells == table.cells


def test_guesses_are_right_as_often_as_chosen() -> None:
    answer = list(range(1000))
    foretold = Foretold(max_draft=8, vocab_size=1000, acceptance=0.7)
    foretold.learn([5] * 8, answer)

    def guess(said: int, first: int = 5) -> list[int]:
        history = [first] * 8 + answer[:said]
        return foretold.propose([DraftRequest(foretold.new_state(), history, 1, prompt_length=8)])[0]

    right = sum(guess(said) == [answer[said]] for said in range(900))
    assert 0.64 < right / 900 < 0.76
    assert guess(7) == guess(7)
    assert guess(3, first=6) == [], "nobody told it of that prompt"
    foretold.acceptance = 0.0
    assert guess(999) == [0]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"acceptances": "0.5,2"}, "acceptances must be between 0 and 1"),
        ({"acceptances": "often"}, "acceptances must be numbers"),
        ({"acceptances": "1", "rtt_sweep": True}, "leave one of them out"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Speculation(**settings)


def test_a_shape_that_nobody_knows_is_refused_before_anything_is_fetched() -> None:
    assert Speculation().model_to_fetch is not None
    curve = Speculation(acceptances="1", shape="round")
    assert curve.model_to_fetch is None
    with pytest.raises(ConfigError, match="shape must be one of qwen3-8b, .* got 'round'"):
        curve.check(picture=False)


@pytest.mark.parametrize("shape, said", [("tiny-qwen3", [18, 19, 20, 21]), ("tiny-llama", [17] * 4)])
def test_random_weights_say_one_token_far_more_surely_than_others(shape: str, said: list[int]) -> None:
    checkpoint = SureCheckpoint(SHAPES[shape], torch.device("cpu"))
    config = EngineConfig(capacity=1, cache=CacheConfig(window=32), kernels=KernelChoice.TORCH, threads=1)
    with Runtime.open(checkpoint, config, name=shape, proposers=()) as runtime:
        session = runtime.create_session()
        runtime.append(session, [3, 50, 17])
        events = list(runtime.generate(session, 4, SamplingParams(logprobs=1)))
    tokens = [event for event in events if isinstance(event, TokenEvent)]
    assert [token.token_id for token in tokens] == said
    assert all(token.logprob is not None and token.logprob > -0.01 for token in tokens)


def test_a_run_over_random_weights(tiny: dict[str, Any], measure: Callable[..., Any]) -> None:
    bench = Speculation(
        **tiny, acceptances="0,1", shape="tiny-llama", sessions="1,2", max_tokens=40, repeats=1
    )
    bench.check(picture=True)
    measured = measure(bench)
    rows = measured.results.gains
    assert [(row.sessions, row.acceptance) for row in rows] == [(1, 0.0), (1, 1.0), (2, 0.0), (2, 1.0)]
    assert {row.same for row in rows} == {1.0}
    assert [row.accepted for row in rows[::2]] == [0, 0]
    assert all(row.tokens_a_step > 3 for row in rows[1::2])
    assert all(row.blocks_speedup and row.as_it_pays_speedup for row in rows)
    assert len(measured.checkpoints) == 4

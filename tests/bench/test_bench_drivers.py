"""The drivers over the real default model, with small work."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from kakeya.bench import engine, ours, quality, quality_choices, startup
from kakeya.bench.engine_results import Startup
from kakeya.bench.long_text import packaged_text
from kakeya.bench.ours import RuntimeSide
from kakeya.bench.plan import CHOICES, LEAD_IN, LEAD_OUT, DecodeCase, PromptCase, SampledCase, quick_plan
from kakeya.bench.prose import prose
from kakeya.bench.quality import QualityBench
from kakeya.bench.quality_choices import ChoicesBench, compare, cut
from kakeya.bench.quality_results import DEFAULT, Choice, Tally
from kakeya.bench.report import Report
from kakeya.bench.startup import engine_config_from, measure_startup
from kakeya.config import CacheConfig, EngineConfig
from kakeya.engine.stream import EventStream
from kakeya.errors import ConfigError
from kakeya.runtime import Runtime
from kakeya.types import (
    DType,
    KernelChoice,
    Numerics,
    SamplingParams,
    TokenEvent,
    TruncatedEvent,
    WeightFormat,
)

CONFIG = EngineConfig(cache=CacheConfig(sink=4, window=64), capacity=4, threads=2)


@pytest.fixture(scope="module")
def runtime(default_model: Path) -> Iterator[Runtime]:
    with Runtime.open(str(default_model), CONFIG) as runtime:
        yield runtime


@pytest.fixture
def side(runtime: Runtime) -> Iterator[RuntimeSide]:
    side = RuntimeSide(runtime, runtime.tokenizer.encode(prose()))
    yield side
    side.release()


def _open_histories(runtime: Runtime) -> list[int]:
    sessions = runtime.list_sessions()[0]
    return [runtime.info(session.session_id).history_length for session in sessions]


def test_a_measured_history_is_as_it_was(side: RuntimeSide, runtime: Runtime) -> None:
    case = DecodeCase(sessions=3, history=20, steps=2)
    side.prepare(case)
    for _ in range(2):
        assert side.measure(case) > 0
        assert _open_histories(runtime) == [21]  # the history and the token that made the engine compute it
    side.release()
    assert _open_histories(runtime) == []


def test_a_history_is_shared_by_the_cases_that_need_it(side: RuntimeSide, runtime: Runtime) -> None:
    for sessions in (1, 2):
        side.prepare(DecodeCase(sessions, history=8, steps=2))
    assert _open_histories(runtime) == [9]


def test_speeds_fit_the_clock(side: RuntimeSide) -> None:
    for case, tokens in ((DecodeCase(2, 70, 8), 16), (PromptCase(100), 100)):
        side.prepare(case)
        began = time.perf_counter()
        speed = side.measure(case)
        assert tokens / speed < time.perf_counter() - began


def test_a_sampled_case_samples_with_a_seed_for_each_session(
    side: RuntimeSide, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SamplingParams | None] = []
    generate = runtime.generate

    def recording(session_id: str, max_tokens: int, sampling: SamplingParams | None = None) -> EventStream:
        asked.append(sampling)
        return generate(session_id, max_tokens, sampling)

    monkeypatch.setattr(runtime, "generate", recording)
    side.prepare(SampledCase(2, 8, 2, "top-p and penalty"))
    assert asked[0] is None  # the history
    assert asked[1:] == [replace(CHOICES["top-p and penalty"], seed=seed) for seed in (0, 1)]


def test_only_full_rounds_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams, one of which is a token ahead: a round counts when the slower one has delivered."""
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)

    def stream(ready_at: list[float]) -> Iterator[TokenEvent | TruncatedEvent]:
        nonlocal now
        yield TruncatedEvent(3)
        for moment in ready_at:
            now = max(now, moment)
            yield TokenEvent(1)

    stamps = ours._round_times([stream([1, 2, 3]), stream([2, 3, 4])], 3)
    assert stamps == [2, 3, 4]


def test_a_prompt_measurement_leaves_no_session(side: RuntimeSide, runtime: Runtime) -> None:
    side.prepare(PromptCase(30))
    assert side.measure(PromptCase(30)) > 0
    assert _open_histories(runtime) == []


def test_prose_is_long_enough_for_a_verdict(runtime: Runtime) -> None:
    assert len(runtime.tokenizer.encode(prose())) >= 2_500


def test_uncounted_rounds_frame_the_counted_ones() -> None:
    assert LEAD_IN >= 1
    assert LEAD_OUT >= 2


def test_engine_report_is_checkpointed_group_by_group(
    default_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "measure_startup", lambda *_, **__: Startup((1.0,), (0.1,)))
    bench = engine.EngineBench(str(default_model), CONFIG, quick_plan(1))
    announced: list[str] = []
    checkpoints: list[Report] = []
    report = engine.run(bench, announced.append, checkpoints.append)
    assert len(announced) == bench.pieces_of_work
    assert [len(partial.results["decode"]) for partial in checkpoints] == [0, 2, 3, 3]
    assert [len(partial.results["sampled"]) for partial in checkpoints] == [0, 0, 0, 6]
    assert all(partial.partial for partial in checkpoints)
    assert not report.partial
    assert report.config["runtime"]["capacity"] == CONFIG.capacity
    assert report.results["memory"]["pool_bytes"] == report.config["runtime"]["pool_bytes"]
    assert report.results["peer"] is None


def test_settings_survive_a_trip_through_json() -> None:
    config = EngineConfig(
        cache=CacheConfig(2, 30, 5),
        capacity=7,
        numerics=Numerics.EXACT,
        dtype=DType.FLOAT32,
        weights=WeightFormat.INT8,
        kernels=KernelChoice.TORCH,
        threads=1,
    )
    again = engine_config_from(json.loads(json.dumps(asdict(config))))
    assert again == config
    assert isinstance(again.weights, WeightFormat)


def test_a_fresh_process_is_timed(default_model: Path) -> None:
    began = time.perf_counter()
    times = measure_startup(str(default_model), CONFIG, repeats=1)
    total = time.perf_counter() - began
    (ready,), (first,) = times.ready_seconds, times.first_token_seconds
    assert 0.1 < ready < total
    assert 0 < first < total - ready


def test_a_process_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="could not load the model: .*absent"):
        measure_startup(str(tmp_path / "absent.gguf"), CONFIG, repeats=1)


def test_a_process_that_says_nothing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup.sys, "executable", "true")
    with pytest.raises(ConfigError, match="no message"):
        measure_startup("any", CONFIG, repeats=1)


def test_text_is_cut_into_passages() -> None:
    assert cut([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]


def test_comparison_is_the_textbook_formula() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
    q = torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]])
    tally = compare(p.log(), q.log() + 3.0, [0, 2])  # logits are free up to a constant
    expected = 0.5 * torch.tensor(2.0).log() - 0.25 * torch.tensor(2.0).log()
    expected += 0.1 * torch.tensor(0.5).log() + 0.8 * torch.tensor(8 / 7).log()
    assert tally.divergence == pytest.approx(float(expected), rel=1e-5)
    assert (tally.positions, tally.agreements, tally.predicted) == (2, 1, 1)
    assert tally.surprise == pytest.approx(-float(torch.tensor(0.25).log()), rel=1e-5)


def test_the_same_distribution_has_no_divergence() -> None:
    scores = torch.randn(5, 11).log_softmax(-1)
    tally = compare(scores, scores, [1, 2, 3, 4, 5])
    assert tally.divergence == pytest.approx(0.0, abs=1e-6)
    assert tally.agreements == 5
    assert tally == compare(scores, scores, [1, 2, 3, 4, 5]) + Tally()


def test_quality_reports_what_cannot_be_had(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Choice(DType.FLOAT32, WeightFormat.INT8, KernelChoice.NATIVE)
    real_open = Runtime.open

    def no_native(model: str, config: EngineConfig) -> Runtime:
        if config.kernels is KernelChoice.NATIVE:
            raise ConfigError("not built")
        return real_open(model, config)

    monkeypatch.setattr(quality_choices.Runtime, "open", no_native)
    choices = ChoicesBench((DEFAULT, refused), passage_tokens=24, most_tokens=40)
    bench = QualityBench(str(default_model), CONFIG, packaged_text(), choices=choices)
    checkpoints: list[Report] = []
    shown: list[tuple[float, str]] = []
    report = quality.run(bench, lambda share, label: shown.append((share, label)), checkpoints.append)
    default, other = report.results["choices"]
    assert other["refused"] == "not built"
    assert default["decode"]["positions"] == default["prompt"]["positions"] == 40
    assert 0 < default["decode"]["mean_kl"] < 0.1
    assert default["decode"]["top1_agreement"] > 0.8
    assert default["decode"]["perplexity"] == pytest.approx(
        report.results["reference"]["perplexity"], rel=0.1
    )
    assert [partial.partial for partial in checkpoints] == [True, True]
    assert [len(partial.results["choices"]) for partial in checkpoints] == [1, 2]
    assert shown[0] == (0.0, "reference: float32 / float32 / torch")
    assert shown[-1] == (1.0, refused.label)
    assert "text" not in report.config  # none was read at length
    assert all(gate.passed is None for gate in report.gates)

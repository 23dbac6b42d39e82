"""`kakeya bench presets` and `kakeya bench preset`."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from kakeya.bench.capacity import Capacity, Preset as Ramp
from kakeya.bench.presets import Preset, read_presets
from kakeya.bench.registry import usable_kinds
from kakeya.bench.runner import Outputs
from kakeya.cli import presets as verbs
from kakeya.cli.bench import ProgramScreen
from kakeya.cli.presets import benchmark_for
from kakeya.errors import ConfigError
from support.programs import Run


def preset(*arguments: str, benchmark: str = "capacity") -> Preset:
    return Preset("mine", "it", benchmark, arguments, 60.0)


def test_every_preset_of_the_package_is_understood() -> None:
    usable = usable_kinds()
    for each in read_presets().values():
        assert each.benchmark not in usable or benchmark_for(each).kind == each.benchmark


def test_arguments_are_read_as_a_command_line_is() -> None:
    benchmark = benchmark_for(preset("--preset", "stress", "--threads", "3"))
    assert isinstance(benchmark, Capacity)
    assert (benchmark.preset, benchmark.threads) == (Ramp.STRESS, 3)
    assert benchmark.window == 64, "with what the benchmark's own preset says"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("--nothing", "1"), "No such option"),
        (("stray",), "unexpected extra argument"),
        (("--levels",), "requires an argument"),
        (("--levels", "9,1"), "levels must be rising"),
        (("--preset", "huge"), "huge"),
        (("--help",), "No such option"),
        (("--output", "/etc/passwd.json"), "--output, --picture, --json, --progress are for whoever runs it"),
        (("--picture", "x.svg"), "are for whoever runs it"),
        (("--json",), "are for whoever runs it"),
        (("--progress", "json"), "are for whoever runs it"),
        (("--proposer-api-key", "secret"), "--proposer-api-key must not stand in a list"),
    ],
)
def test_dangerous_or_senseless_arguments_are_refused(
    tmp_path: Path, run: Run, arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        benchmark_for(preset(*arguments))
    assert words in str(refused.value)
    assert str(refused.value).startswith("preset 'mine': ")
    manifest = tmp_path / "m.toml"
    manifest.write_text(
        f'[mine]\nproves = "it"\nbenchmark = "capacity"\narguments = {json.dumps(arguments)}\nlimit_s = 1\n'
    )
    for verb in (("bench", "presets"), ("bridge", "serve", "--bind", "127.0.0.1:0")):
        outcome = run(*verb, "--manifest", str(manifest))
        assert outcome.status == 2
        assert words in outcome.err


def test_the_list(run: Run) -> None:
    outcome = run("bench", "presets")
    assert outcome.status == 0
    assert "kakeya bench capacity --preset stress" in outcome.out
    assert "4 h 30 min" in outcome.out
    told = json.loads(run("bench", "presets", "--json").out)
    assert [each["name"] for each in told] == list(read_presets())


def test_a_preset_runs_here(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(verbs, "measure", lambda *what: asked.extend(what))
    assert run("bench", "preset", "agent-capacity-stress").status == 0
    assert asked == [benchmark_for(read_presets()["agent-capacity-stress"]), asked[1]]
    assert asked[1] == Outputs(output=Path("bench-agent-capacity-stress.json"))
    assert "no preset 'other'" in run("bench", "preset", "other").err


def test_its_time_limit_is_a_signal() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with verbs._ending_at(0.01):
            while not heard:
                time.sleep(0.001)
        with verbs._ending_at(0.2):
            pass
        time.sleep(0.3)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM], "and none after its end"


def test_progress_for_programs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, default_model: Path
) -> None:
    screen = ProgramScreen()
    assert screen.fetch("smollm2-135m-instruct").exists()
    moments = iter([5.0, 5.0, 5.1, 5.3, 5.3])
    monkeypatch.setattr("kakeya.cli.bench.time.monotonic", lambda: next(moments))
    with screen.progress() as progress:
        for done in (0.123456, 0.2, 0.3):
            progress(done, "16 agents")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    assert lines == [
        {"progress": 0.0, "work": "fetching smollm2-135m-instruct"},
        {"progress": 0.1235, "work": "16 agents"},
        {"progress": 0.3, "work": "16 agents"},
    ]

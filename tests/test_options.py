"""One list of settings: a field is a flag of every verb, a setting of the engine, and a line of a report."""

import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from kakeya.bench.processes import serve_flags, serve_secrets
from kakeya.cli.chat import ChatOptions
from kakeya.cli.command import ENVIRONMENT_PREFIX, command_of, read_file
from kakeya.cli.generate import GenerateOptions
from kakeya.cli.serve_options import ServeOptions
from kakeya.config import CacheConfig, Calling, EngineConfig
from kakeya.errors import ConfigError
from kakeya.options import SECRETS, EngineOptions, SamplingOptions, TalkOptions, build, flags
from kakeya.types import BackendChoice, DType, KernelChoice, Numerics, SamplingParams, WeightFormat
from support.programs import Run

# Each other than its default.
ASKED: dict[str, Any] = {
    "model": "some/model",
    "backend": BackendChoice.CPU,
    "sink": 7,
    "window": 99,
    "recall": 9,
    "dtype": DType.FLOAT32,
    "weights": WeightFormat.INT8,
    "numerics": Numerics.EXACT,
    "kernels": KernelChoice.TORCH,
    "threads": 3,
    "proposer": "ngram",
    "draft_tokens": 5,
    "draft_ahead": 6,
    "proposer_api_key": "a-key",
    "proposer_tls_ca": "system",
    "proposer_tls_cert": "cert.pem",
    "proposer_tls_key": "key.pem",
}
# Who calls remote proposers is nobody else's business.
UNTOLD = {name for name in ASKED if name.startswith("proposer_")}


def names(options: type) -> list[str]:
    return [field.name for field in fields(options)]


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


@pytest.mark.parametrize("verb", ["chat", "generate", "serve", "bench engine", "bench conversation"])
def test_every_engine_setting_is_in_the_help_of(run: Run, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = run(*verb.split(), "--help").out.split()
    assert {flag(name) for name in names(EngineOptions)} <= set(said)


@pytest.mark.parametrize("verb", ["chat", "generate"])
def test_every_setting_of_an_answer_is_in_the_help_of(
    run: Run, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    said = run(verb, "--help").out.split()
    assert {flag(name) for name in names(SamplingOptions)} <= set(said)


def test_every_engine_setting_reaches_the_engine_and_the_report() -> None:
    assert set(ASKED) == set(names(EngineOptions))
    config = EngineOptions(**ASKED).engine_config(capacity=5)
    assert config == EngineConfig(
        backend=BackendChoice.CPU,
        cache=CacheConfig(sink=7, window=99, recall=9),
        capacity=5,
        dtype=DType.FLOAT32,
        weights=WeightFormat.INT8,
        numerics=Numerics.EXACT,
        kernels=KernelChoice.TORCH,
        threads=3,
        proposer="ngram",
        draft_tokens=5,
        draft_ahead=6,
        calling=Calling("a-key", "system", "cert.pem", "key.pem"),
    )
    reported = asdict(config.resolved())
    flat = reported | reported["cache"] | {"model": "some/model"}
    assert {name: flat[name] for name in set(ASKED) - UNTOLD} == {
        name: value for name, value in ASKED.items() if name not in UNTOLD
    }
    assert "a-key" not in str(reported)


def test_every_engine_setting_reaches_the_server_of_a_benchmark(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = serve_flags(EngineOptions(**ASKED), 1)
    given = dict(zip(line[::2], line[1::2], strict=True))
    told = {flag(name): str(value) for name, value in ASKED.items() if name not in SECRETS}
    assert told.items() <= given.items()
    assert "a-key" not in line, "anybody can read a command line"
    environment = serve_secrets(EngineOptions(**ASKED))
    assert environment == {"KAKEYA_PROPOSER_API_KEY": "a-key"}
    assert serve_secrets(EngineOptions()) == {}
    monkeypatch.setenv(*environment.popitem())
    shown = run("serve", *line, "--print-config")
    assert shown.status == 0, shown.err
    settings = tomllib.loads(shown.out)
    shown_of_it = {name: settings.get(name.replace("_", "-")) for name in ASKED}
    assert shown_of_it == ASKED | {"proposer_api_key": None}, "a key is not shown"
    assert "# proposer-api-key is set by environment, and not shown" in shown.out


@dataclass(frozen=True)
class WithOneMore(EngineOptions):
    """A setting that no verb has yet: this line is all that it takes."""

    max_waiting: Annotated[int, typer.Option(help="Calls that may wait.")] = EngineConfig.max_waiting
    config: Annotated[Path | None, typer.Option(is_eager=True, callback=read_file)] = None


@pytest.fixture
def asked() -> Callable[..., WithOneMore]:
    """What a verb with one more setting understands."""
    heard: list[WithOneMore] = []
    app = typer.Typer()
    app.command(context_settings={"auto_envvar_prefix": ENVIRONMENT_PREFIX})(
        command_of(WithOneMore, lambda context, options: heard.append(options))
    )

    def ask(*line: str, **environment: str) -> WithOneMore:
        outcome = CliRunner().invoke(app, line, env=environment, catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
        return heard.pop()

    return ask


def test_a_new_setting_is_one_line(asked: Callable[..., WithOneMore], tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("max-waiting = 3\n")
    assert asked().engine_config().max_waiting == EngineConfig.max_waiting
    assert asked("--max-waiting", "1").engine_config().max_waiting == 1
    assert asked(KAKEYA_MAX_WAITING="2").engine_config().max_waiting == 2
    assert asked("--config", str(file)).engine_config().max_waiting == 3
    assert asdict(asked("--max-waiting", "1").engine_config())["max_waiting"] == 1
    assert flags(vars(asked("--max-waiting", "1")))[-2:] == ["--max-waiting", "1"]


def test_a_setting_that_was_left_out_has_its_default() -> None:
    assert EngineOptions().engine_config() == EngineConfig()
    assert build(CacheConfig, {"sink": None, "window": 9, "colour": "red"}) == CacheConfig(window=9)
    assert flags({"max_batch_tokens": 5, "threads": None}) == ["--max-batch-tokens", "5"]


def test_answers_are_greedy_unless_a_verb_says_otherwise() -> None:
    greedy = GenerateOptions(prompt="hello", seed=0)
    assert greedy.sampling_params() == SamplingParams()
    talking = ChatOptions(seed=5).sampling_params()
    assert talking == SamplingParams(temperature=0.2, top_p=0.9, repetition_penalty=1.1, seed=5)
    assert (greedy.max_tokens, ChatOptions().max_tokens) == (256, 512)
    assert ChatOptions().sampling_params() != ChatOptions().sampling_params(), "each draws its own seed"
    with pytest.raises(ConfigError, match="max-tokens must be at least 1, got 0"):
        SamplingOptions(max_tokens=0)


@pytest.mark.parametrize(
    ("asked", "recall"),
    [({}, 256), ({"window": 600}, 128), ({"window": 255}, 0), ({"recall": 0}, 0), ({"recall": 64}, 64)],
)
def test_conversations_recall_a_quarter_of_their_window(asked: dict[str, int], recall: int) -> None:
    assert TalkOptions(**asked).engine_config().cache.recall == recall
    assert TalkOptions(**asked).engine_config(capacity=3).capacity == 3
    assert EngineOptions(**asked).engine_config().cache.recall == asked.get("recall", 0)


def test_nothing_is_recalled_where_clients_say_it_themselves() -> None:
    assert ServeOptions().engine_config().cache.recall == 256
    assert ServeOptions(http="off").engine_config().cache.recall == 0
    assert ServeOptions(http="off", recall=64).engine_config().cache.recall == 64

"""`kakeya train`: makes a drafter for a model, by nothing but the model."""

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from kakeya import options
from kakeya.cli.command import command_of
from kakeya.cli.console import FetchBar, Screen
from kakeya.config import DEFAULT_MODEL, CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from kakeya.types import BackendChoice, Numerics

if TYPE_CHECKING:
    from kakeya.training.drafter import Request
    from kakeya.training.report import Report

_data = partial(typer.Option, rich_help_panel="The conversations")
_network = partial(typer.Option, rich_help_panel="The network")
_budget = partial(typer.Option, rich_help_panel="The training")

_SESSIONS = {BackendChoice.CUDA: 256, BackendChoice.CPU: 16}
_BATCH = {BackendChoice.CUDA: 64, BackendChoice.CPU: 8}
_ANCHORS = {BackendChoice.CUDA: 128, BackendChoice.CPU: 32}


def register(app: typer.Typer) -> None:
    about = "Train what makes a model faster."
    train = typer.Typer(help=about, no_args_is_help=True)
    train.callback()(lambda: None)  # so that `drafter` stays a verb of its own
    train.command(
        "drafter",
        help="Train a drafter: a small network that guesses what the model will say. The model writes the "
        "conversations that it learns from. Takes minutes on a CUDA device, and hours on a CPU.",
    )(command_of(DrafterOptions, drafter))
    app.add_typer(train, name="train")


@dataclass(frozen=True, kw_only=True)
class DrafterOptions:
    """What `kakeya train drafter` was asked for: one field per flag."""

    model: options.Model = DEFAULT_MODEL
    output: Annotated[Path, typer.Option(help="The drafter's file.")]
    licence: Annotated[str | None, typer.Option(help="Noted in the file; the catalogue's when left out.")] = (
        None
    )
    backend: Annotated[
        BackendChoice, options.memory(help="What computes; `auto` is a CUDA device where torch sees one.")
    ] = EngineConfig.backend
    numerics: Annotated[
        Numerics, options.memory(help="`exact`: the same conversations however many are written at once.")
    ] = EngineConfig.numerics
    threads: options.Threads = None
    data: Annotated[
        Path | None,
        _data(help="Where conversations are kept; beside the drafter when left out. Those in it are used."),
    ] = None
    conversations: Annotated[int, _data(help="How many conversations the model writes.")] = 20_480
    conversation_tokens: Annotated[int, _data(help="The most tokens of a conversation.")] = 512
    sessions: Annotated[
        int | None, _data(help="Conversations written at once: 256 on CUDA and 16 on a CPU when left out.")
    ] = None
    openings: Annotated[
        Path | None,
        _data(
            help="What the first user of most conversations begins with, one on a line: words that people "
            "begin with. English ones when left out; none with an empty file."
        ),
    ] = None
    writers: Annotated[
        int,
        _data(
            help="Processes that write them, each with its own model: five keep an H200 busy, one does not."
        ),
    ] = 1
    only_write: Annotated[bool, _data("--only-write", help="Write the conversations and stop.")] = False
    kind: Annotated[
        str, _network(help="`steps` guesses a token at a time, `block` a whole block in one pass.")
    ] = "steps"
    block: Annotated[int, _network(help="The most tokens of a draft.")] = 8
    layers: Annotated[int | None, _network(help="1 for steps and 3 for a block when left out.")] = None
    width: Annotated[int | None, _network(help="The layers' inner size; the model's when left out.")] = None
    draft_vocab: Annotated[
        int, _network(help="The most tokens that it can guess: those that answers have most often.")
    ] = 16_384
    steps: Annotated[int | None, _budget(help="Training steps; 3000 when minutes are left out too.")] = None
    minutes: Annotated[float | None, _budget(help="Train for so long instead.")] = None
    seed: Annotated[int, _budget(help="Same seed and steps, same drafter.")] = 0
    batch: Annotated[
        int | None, _budget(help="Conversations of a step: 64 on CUDA and 8 on a CPU when left out.")
    ] = None
    anchors: Annotated[
        int | None,
        _budget(help="Positions to draft from in each of them: 128 on CUDA and 32 on a CPU when left out."),
    ] = None
    unroll: Annotated[int, _budget(help="Steps of its own that a `steps` drafter is trained on.")] = 6
    learning_rate: Annotated[float, _budget(help="At its highest.")] = 1.5e-3
    held_out: Annotated[
        int, _budget(help="Conversations kept for the examination, at most a tenth of all.")
    ] = 384
    compiled: Annotated[
        bool,
        _budget("--compile", help="Compile the loss first, which takes up to a minute: for long trainings."),
    ] = False
    resume: Annotated[
        bool, _budget("--resume", help="Go on with an interrupted training of the same settings.")
    ] = False
    report: Annotated[Path | None, _budget(help="The JSON report; beside the drafter when left out.")] = None


def drafter(context: typer.Context, asked: DrafterOptions) -> None:
    """Check the settings, fetch the model, train, and show what came out."""
    request = _request(asked)
    from kakeya.models.catalogue import resolve
    from kakeya.training.drafter import train_drafter

    screen = Screen()
    with FetchBar(screen) as fetching:
        resolve(asked.model, fetching, request.engine)
    with _stages(screen) as tell:
        report = train_drafter(request, tell)
    if request.only_write:
        screen.line(str(request.data_file))
        return
    _show(screen, report)
    screen.notice(f"report: {request.report_file}")
    screen.line(str(request.output))


def _request(asked: DrafterOptions) -> "Request":
    """What was asked for, checked. Raises ConfigError."""
    from kakeya.engine.backends import chosen_backend
    from kakeya.training.drafter import Request
    from kakeya.training.openings import OPENINGS
    from kakeya.training.settings import DataSettings, NetworkSettings, TrainingSettings

    if asked.steps is not None and asked.minutes is not None:
        raise ConfigError("either --steps or --minutes is the budget, not both")
    if asked.sessions is not None and asked.sessions < 1:
        raise ConfigError(f"sessions must be at least 1, got {asked.sessions}")
    if asked.backend is BackendChoice.MLX:
        raise ConfigError("training does not run on mlx; choose --backend cpu or cuda")
    backend = chosen_backend(EngineConfig(backend=asked.backend)).backend
    steps = 3000 if asked.steps is None and asked.minutes is None else asked.steps
    openings = OPENINGS if asked.openings is None else _lines(asked.openings)
    data = DataSettings(asked.conversations, asked.conversation_tokens, asked.seed, openings)
    window = max(CacheConfig.window, data.tokens)
    engine = options.build(
        EngineConfig,
        {
            "backend": backend,
            "numerics": asked.numerics,
            "threads": asked.threads,
            "capacity": _SESSIONS[backend] if asked.sessions is None else asked.sessions,
            "cache": CacheConfig(window=window),
        },
    )
    return Request(
        model=asked.model,
        output=asked.output,
        data_file=asked.data or asked.output.with_name(asked.output.name + ".conversations"),
        report_file=asked.report or asked.output.with_name(asked.output.name + ".json"),
        engine=engine,
        data=data,
        network=NetworkSettings(
            asked.kind,  # type: ignore[arg-type]
            asked.block,
            asked.layers,
            asked.width,
            asked.draft_vocab,
        ),
        training=TrainingSettings(
            steps=steps,
            minutes=asked.minutes,
            batch=_BATCH[backend] if asked.batch is None else asked.batch,
            anchors=_ANCHORS[backend] if asked.anchors is None else asked.anchors,
            unroll=asked.unroll,
            learning_rate=asked.learning_rate,
            held_out=asked.held_out,
            seed=asked.seed,
            compiled=asked.compiled,
        ),
        command=shlex.join(["kakeya", *sys.argv[1:]]),
        licence=asked.licence,
        resume=asked.resume,
        only_write=asked.only_write,
        writers=asked.writers,
    )


def _lines(path: Path) -> tuple[str, ...]:
    """The lines of a file that are not empty. Raises ConfigError."""
    try:
        return tuple(filter(None, map(str.strip, path.read_text(encoding="utf-8").splitlines())))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the openings cannot be read from {path}: {error}") from error


@contextmanager
def _stages(screen: Screen) -> Iterator[Callable[[str, float, str], None]]:
    """A bar for each stage on a terminal; elsewhere a line now and then."""
    if not screen.err.is_terminal:
        yield _Lines(screen)
        return
    with Progress(
        "{task.description}",
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        "{task.fields[words]}",
        console=screen.err,
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(stage: str, share: float, words: str) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=1.0, words=words)
            bars.update(tasks[stage], completed=share, words=words)

        yield tell


class _Lines:
    """Progress as lines: when a stage begins or ends, and every few seconds."""

    def __init__(self, screen: Screen, every_s: float = 5.0) -> None:
        self._screen, self._every = screen, every_s
        self._stage, self._told = "", 0.0

    def __call__(self, stage: str, share: float, words: str) -> None:
        now = time.monotonic()
        if stage == self._stage and share < 1 and now - self._told < self._every:
            return
        self._stage, self._told = stage, now
        self._screen.notice(f"{stage}: {share:.0%}, {words}")


def _show(screen: Screen, report: "Report") -> None:
    """What the examination found, as a table."""
    from kakeya.training.report import short

    table = Table(
        "temperature", "block", "tokens per step", "of answers that end", "right, by place", box=SIMPLE
    )
    for answers in report.examined[-1]["answers"]:
        brief = short(answers)
        places = " ".join(_two_digits(each) for each in answers["every_answer"]["acceptance_by_place"])
        table.add_row(
            f"{brief['temperature']:g}",
            str(brief["block"]),
            _two_digits(brief["tokens_per_step"]),
            _two_digits(brief["ended_by_itself"]),
            places,
        )
    screen.err.print(table)


def _two_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

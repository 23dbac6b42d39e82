"""`kakeya bench engine`: speed, memory and start of the engine, alone or beside llama.cpp."""

from pathlib import Path
from typing import Annotated

import typer

from kakeya.bench.report import check_output, check_picture
from kakeya.cli import options
from kakeya.cli.bench_common import (
    Drawing,
    Json,
    Output,
    Quick,
    Repeats,
    conclude,
    counted_progress,
    fetch,
    write,
)
from kakeya.cli.console import Screen
from kakeya.config import DEFAULT_MODEL, CacheConfig, EngineConfig
from kakeya.errors import ConfigError


def register(bench: typer.Typer) -> None:
    bench.command("engine", help="Speed, memory and start of the engine.")(engine)


def engine(
    model: options.Model = DEFAULT_MODEL,
    peers: Annotated[bool, typer.Option("--peers", help="Measure llama.cpp beside us, in turns.")] = False,
    repeats: Repeats = 5,
    quick: Quick = False,
    longest_history: Annotated[int | None, typer.Option(help="Leave out longer histories.")] = None,
    most_sessions: Annotated[int | None, typer.Option(help="Leave out more sessions at once.")] = None,
    output: Output = Path("bench-engine.json"),
    picture: Annotated[Path | None, typer.Option(help="Write speed over history as SVG.")] = None,
    as_json: Json = False,
    backend: options.Backend = EngineConfig.backend,
    sink: options.Sink = CacheConfig.sink,
    window: options.Window = CacheConfig.window,
    dtype: options.Dtype = EngineConfig.dtype,
    weights: options.Weights = EngineConfig.weights,
    numerics: options.NumericMode = EngineConfig.numerics,
    kernels: options.Kernels = EngineConfig.kernels,
    threads: options.Threads = None,
) -> None:
    """Measure, write the report, show the tables; exit 1 when a gate failed."""
    config = options.engine_config(
        backend=backend,
        sink=sink,
        window=window,
        dtype=dtype,
        weights=weights,
        numerics=numerics,
        kernels=kernels,
        threads=threads,
    )
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}")
    for name, limit, least in (("longest-history", longest_history, 64), ("most-sessions", most_sessions, 1)):
        if limit is not None and limit < least:
            raise ConfigError(f"{name} must be at least {least}, or nothing is left to measure; got {limit}")
    check_output(output)
    check_picture(picture)
    screen = Screen()
    fetch(screen, model)
    from kakeya.bench.engine import EngineBench, run
    from kakeya.bench.engine_page import engine_page, engine_sections, history_picture
    from kakeya.bench.plan import full_plan, limited, quick_plan

    plan = limited(quick_plan(repeats) if quick else full_plan(repeats), longest_history, most_sessions)
    bench = EngineBench(model, config, plan, peers)
    with counted_progress(screen, bench.pieces_of_work) as announce:
        report = run(bench, announce, lambda partial: write(output, partial, engine_page))
    tables = [section.table for section in engine_sections(report.results)]
    drawing = Drawing(picture, history_picture)
    conclude(screen, output, report, engine_page, tables, drawing, as_json=as_json)

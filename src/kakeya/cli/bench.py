"""`kakeya bench`: measurements, one file for each of its verbs."""

import typer

from kakeya.cli import (
    bench_capacity,
    bench_engine,
    bench_gpu,
    bench_http_session,
    bench_overhead,
    bench_peers,
    bench_quality,
    bench_report,
    bench_session,
    bench_turns,
)

VERBS = (
    bench_engine,
    bench_gpu,
    bench_quality,
    bench_session,
    bench_capacity,
    bench_overhead,
    bench_turns,
    bench_http_session,
    bench_peers,
    bench_report,
)


def register(app: typer.Typer) -> None:
    bench = typer.Typer(help="Measure speed, memory, capacity and quality.", no_args_is_help=True)
    for verb in VERBS:
        verb.register(bench)
    app.add_typer(bench, name="bench")

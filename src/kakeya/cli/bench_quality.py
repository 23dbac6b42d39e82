"""`kakeya bench quality`: what each choice of dtype, weights and kernels costs."""

from pathlib import Path

import typer

from kakeya.bench.report import check_output
from kakeya.cli import options
from kakeya.cli.bench_common import Json, Output, Quick, conclude, counted_progress, fetch, write
from kakeya.cli.console import Screen
from kakeya.config import DEFAULT_MODEL, EngineConfig


def register(bench: typer.Typer) -> None:
    bench.command("quality", help="What each choice of dtype, weights and kernels costs.")(quality)


def quality(
    model: options.Model = DEFAULT_MODEL,
    quick: Quick = False,
    output: Output = Path("bench-quality.json"),
    as_json: Json = False,
    threads: options.Threads = None,
) -> None:
    """Measure, write the report, show the table; exit 1 when a gate failed."""
    config = EngineConfig() if threads is None else EngineConfig(threads=threads)
    check_output(output)
    screen = Screen()
    fetch(screen, model)
    from kakeya.bench.quality import QualityBench, run
    from kakeya.bench.quality_page import quality_page, quality_table
    from kakeya.bench.quality_results import DEFAULT

    bench = QualityBench(model, config)
    if quick:
        bench = QualityBench(model, config, choices=(DEFAULT,), passage_tokens=32, most_tokens=48)
    with counted_progress(screen, bench.pieces_of_work) as announce:
        report = run(bench, announce, lambda partial: write(output, partial, quality_page))
    conclude(screen, output, report, quality_page, [quality_table(report.results)], as_json=as_json)

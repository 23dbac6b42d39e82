"""`kakeya bench gpu`: the engine on one CUDA device beside what its memory allows."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya.bench.gpu_results import Part
from kakeya.bench.report import check_output, check_picture
from kakeya.cli.bench_common import Drawing, Json, Output, conclude, timed_progress, write
from kakeya.cli.command import command_of
from kakeya.cli.console import Screen
from kakeya.errors import ConfigError

if TYPE_CHECKING:
    from kakeya.bench.gpu import GpuBench


class Device(StrEnum):
    """Where it runs."""

    CUDA = "cuda"
    CPU = "cpu"


def register(bench: typer.Typer) -> None:
    bench.command("gpu", help="Steps, prompts and sessions on one CUDA device, with random weights.")(
        command_of(GpuOptions, gpu)
    )


@dataclass(frozen=True)
class GpuOptions:
    """What `kakeya bench gpu` was asked for: one field per flag."""

    part: Annotated[
        list[Part] | None,
        typer.Option(help="What to measure; may be given more than once. All of them when left out."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(help="Real weights for the part parity: a GGUF file or a directory with safetensors."),
    ] = None
    seconds: Annotated[
        float, typer.Option(help="What would not end within this time any more is not begun.")
    ] = 480.0
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny shapes for a few seconds, to see that it runs.")
    ] = False
    device: Annotated[Device, typer.Option(help="`cpu` is for --quick alone: to see that it runs.")] = (
        Device.CUDA
    )
    output: Output = Path("bench-gpu.json")
    picture: Annotated[Path | None, typer.Option(help="Write steps beside their floors as SVG.")] = None
    as_json: Json = False

    def check(self) -> None:
        """Refuse what cannot be, before any time is spent. Raises ConfigError."""
        check_output(self.output)
        check_picture(self.picture)
        if self.picture is not None and self.part and Part.STEPS not in self.part:
            raise ConfigError("--picture draws the part steps, which was not asked for")

    def bench(self) -> "GpuBench":
        """The benchmark's settings. Raises ConfigError, also where there is no such device."""
        from kakeya.bench.gpu import GpuBench

        return GpuBench(
            device=self.device.value,
            parts=frozenset(self.part or Part),
            model=self.model,
            seconds=self.seconds,
            quick=self.quick,
        )


def gpu(context: typer.Context, options: GpuOptions) -> None:
    """Measure, write the report, show the tables; exit 1 when a gate failed."""
    options.check()
    bench, screen = options.bench(), Screen()
    from kakeya.bench.gpu import run
    from kakeya.bench.gpu_page import gpu_page, gpu_picture, gpu_sections

    with timed_progress(screen) as progress:
        report = run(bench, progress, lambda partial: write(options.output, partial, gpu_page))
    tables = [section.table for section in gpu_sections(report.results)]
    drawing = Drawing(options.picture, gpu_picture)
    conclude(screen, options.output, report, gpu_page, tables, drawing, as_json=options.as_json)

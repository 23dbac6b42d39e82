"""`kakeya bench gpu`: its flags. `measure` has its jobs, `results` its conclusions."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from kakeya.bench.benchmark import Benchmark, Run
from kakeya.bench.gpu.plan import FULL, QUICK, GpuPlan
from kakeya.bench.gpu.results import GpuResults, Part, gpu_gates
from kakeya.bench.gpu.tables import show
from kakeya.bench.report import Gate
from kakeya.errors import ConfigError


class Device(StrEnum):
    """Where to run."""

    CUDA = "cuda"
    CPU = "cpu"


@dataclass(frozen=True)
class GpuBench(Benchmark[GpuResults]):
    """Where to measure, which parts, and for how long."""

    kind = "gpu"
    title = "GPU benchmark"
    help = "Steps, prompts and sessions on one CUDA device, with random weights."
    results = GpuResults

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

    @property
    def parts(self) -> frozenset[Part]:
        """Those asked for, and the machine, which is always measured."""
        return frozenset(self.part or Part) | {Part.MACHINE}

    @property
    def plan(self) -> GpuPlan:
        return QUICK if self.quick else FULL

    def check(self, *, picture: bool) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"seconds must be above 0, got {self.seconds:g}")
        if self.device is not Device.CUDA and not self.quick:
            raise ConfigError(f"on the device {self.device} only --quick runs: its figures say nothing")
        if picture and Part.STEPS not in self.parts:
            raise ConfigError("--picture draws the part steps, which was not asked for")
        from kakeya.bench.gpu.device import open_device

        open_device(self.device)

    def run(self, run: Run[GpuResults]) -> GpuResults:
        """A job that fails, or that has no time left, is reported as absent with the reason."""
        from kakeya.bench.gpu.measure import measure

        run.facts |= {
            "parts": self.parts,
            "weights": "random, of the named shapes; parity alone reads the model",
            "plan": self.plan,
        }
        return measure(self, run)

    def gates(self, results: GpuResults) -> list[Gate]:
        return gpu_gates(results)

    show = staticmethod(show)

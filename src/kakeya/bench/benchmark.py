"""What a benchmark is: flags, a run, typed results, the gates they are held to, and what is shown of them."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import typer

from kakeya.bench.interrupts import Interruption, interruptible
from kakeya.bench.report import Gate
from kakeya.bench.tables import Chart, Table
from kakeya.bench.usage import Bystanders
from kakeya.config import NO_PROPOSER
from kakeya.errors import ConfigError
from kakeya.options import SECRETS, EngineOptions, Proposer

Repeats = Annotated[int, typer.Option(help="Repetitions of every measurement; medians are reported.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few seconds of the same work, to see that it runs.")]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Results:
    """What was measured. Fields and properties, those of the rows too, become the report's JSON.

    The runner fills in these two: what others used of the machine, and the signal that ended the run.
    """

    bystanders_share: float | None = None
    abort_reason: str | None = None


R = TypeVar("R", bound=Results)


@dataclass(frozen=True)
class Benchmark(ABC, Generic[R]):
    """A measurement. Its fields are its flags, annotated for Typer; a bad value raises ConfigError.

    It opens no file and draws nothing: `run` gets all it needs from the Run, and the runner does the rest.
    """

    kind: ClassVar[str]
    """The name of the verb, and of the reports."""
    title: ClassVar[str]
    help: ClassVar[str]
    results: ClassVar[type[Results]]
    secrets: ClassVar[frozenset[str]] = SECRETS
    """Fields that no report tells."""

    @property
    def model_to_fetch(self) -> str | None:
        """What must be there before the clock starts; None for nothing."""
        return None

    @property
    def checkpoint_every_s(self) -> float:
        """How far apart partial reports are; 0 for one at each checkpoint."""
        return 0.0

    def presets(self) -> dict[str, Any]:
        """Values of fields for which the command line says nothing."""
        return {}

    def require_least(self, **limits: float) -> None:
        """Refuse fields below these limits; one that is None is not there. Raises ConfigError."""
        for name, limit in limits.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise ConfigError(f"{name.replace('_', '-')} must be at least {limit}, got {value}")

    def check(self, *, picture: bool) -> None:
        """Refuse what cannot be, before anything is fetched. `picture`: one is wanted. Raises ConfigError."""

    @abstractmethod
    def run(self, run: "Run[R]") -> R:
        """Measure. Raises ConfigError for what cannot be had, PeerFailed and RemoteError for what broke."""

    @abstractmethod
    def gates(self, results: R) -> list[Gate]:
        """The limits the results are held to; those of a partial report as far as it goes."""

    @staticmethod
    @abstractmethod
    def show(results: Any) -> list[Table | Chart]:
        """Tables, each with its charts behind it; on the terminal the charts are left out."""


@dataclass(frozen=True)
class EngineBenchmark(EngineOptions, Benchmark[R]):
    """One with the model and the engine of everybody else's flags.

    It decodes plainly unless told otherwise: how often a text repeats itself should not decide our figures.
    """

    proposer: Proposer = NO_PROPOSER

    @property
    def model_to_fetch(self) -> str | None:
        return self.model

    def check(self, *, picture: bool) -> None:
        self.engine_config(capacity=1)


@dataclass
class Run(Generic[R]):
    """What a benchmark has of the outside: progress, partial reports, signals, and how busy others are."""

    progress: Callable[[float, str], None] = lambda done, work: None
    """Say how far the run is, 0 to 1, and what is going on."""
    write: Callable[[R], object] = lambda results: None
    model_path: Path | None = None
    """Where the model lies that was fetched."""
    checkpoint_every_s: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    """What is known only now, such as what the server says: goes beside the settings in the report."""
    machine: dict[str, Any] = field(default_factory=dict)
    """What is known of the machine only now."""
    interruption: Interruption = field(default_factory=Interruption)
    share: float | None = None
    _bystanders: Bystanders | None = None
    _written: float = field(default_factory=lambda: time.monotonic())

    def work(self, total: float) -> "Work":
        """Progress over pieces or tokens that can be counted."""
        return Work(total, self.progress)

    def checkpoint(self, results: R) -> None:
        """Have a partial report written, if the last one is old enough."""
        if time.monotonic() - self._written >= self.checkpoint_every_s:
            self._written = time.monotonic()
            self.write(self.stamped(results))

    def stamped(self, results: R) -> R:
        """With what the runner knows."""
        share = self.share if self._bystanders is None else self._bystanders.share()
        return replace(results, bystanders_share=share, abort_reason=self.interruption.reason)

    @contextmanager
    def watching(self, pids: Sequence[int | None]) -> Iterator[None]:
        """Everybody but these processes is a bystander meanwhile. Leave it before the processes end."""
        self._bystanders = Bystanders(pids)
        try:
            yield
        finally:
            self.share, self._bystanders = self._bystanders.share(), None

    def asynchronously(self, work: Coroutine[Any, Any, T]) -> T:
        """Run an event loop on which SIGINT and SIGTERM only ask for the end: see `interruption`."""

        async def heard() -> T:
            with interruptible(self.interruption):
                return await work

        return asyncio.run(heard())


class Work:
    """Counts tokens or pieces off a total, for the progress bar."""

    def __init__(self, total: float, show: Callable[[float, str], None]) -> None:
        self._total, self._show = max(1.0, total), show
        self._done, self._label = 0.0, ""

    def begin(self, label: str) -> None:
        self._label = label
        self.advance(0)

    def piece(self, label: str) -> None:
        """Begin the next of so many pieces that count alike."""
        self.begin(label)
        self._done += 1

    def advance(self, amount: float) -> None:
        self._done += amount
        # The total is an estimate in places: a bar never runs over its end.
        self._show(min(1.0, self._done / self._total), self._label)


def numbers(name: str, text: str) -> tuple[int, ...]:
    """The value of a flag that takes several. Raises ConfigError naming it."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{name} must be whole numbers with commas, such as 1,16,64, got {text!r}"
        ) from None

"""`kakeya bench quality`: its flags, what they refuse, and the run. Each part has a file of its own."""

import hashlib
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from kakeya.bench.benchmark import Benchmark, Quick, Results, Run, numbers
from kakeya.bench.peers.llama import require_llama
from kakeya.bench.quality.choices import (
    FACTS,
    Choice,
    ChoiceResults,
    ChoiceRow,
    Scores,
    choices_to_try,
    measure_choices,
)
from kakeya.bench.quality.memory import FAR_TOKENS, MemoryResults, Way, measure_memory, tokens_afresh
from kakeya.bench.quality.peer import ASKED_BY, PeerResults, measure_peer
from kakeya.bench.quality.scoring import open_alone
from kakeya.bench.report import Gate
from kakeya.bench.tables import Chart, Table
from kakeya.bench.text import prose
from kakeya.config import DEFAULT_MODEL, CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from kakeya.options import Model, Threads, build

_memory = partial(typer.Option, rich_help_panel="The part memory")
_peer = partial(typer.Option, rich_help_panel="The part peer")

# Roughly what the packaged text has.
TEXT_TOKENS = 3000
# And roughly how long a token of any text is.
BYTES_A_TOKEN = 4


class Part(StrEnum):
    """What there is to measure: arithmetic, long histories, llama.cpp beside us."""

    CHOICES = "choices"
    MEMORY = "memory"
    PEER = "peer"


_MEASURES = {
    Part.CHOICES: measure_choices,
    Part.MEMORY: measure_memory,
    Part.PEER: measure_peer,
}


@dataclass(frozen=True, kw_only=True)
class QualityResults(Results):
    """What the parts found; None for those that were not measured, or not yet."""

    reference: Scores | None = None
    choices: tuple[ChoiceRow, ...] = ()
    memory: MemoryResults | None = None
    peer: PeerResults | None = None

    def parts(self) -> list[ChoiceResults | MemoryResults | PeerResults]:
        """Those that were measured."""
        choices = ChoiceResults(self.reference, self.choices) if self.reference else None
        return [part for part in (choices, self.memory, self.peer) if part is not None]


@dataclass(frozen=True)
class QualityBench(Benchmark[QualityResults]):
    """The model, the text that is read at length, and the parts to measure."""

    kind = "quality"
    title = "Quality benchmark"
    help = "What arithmetic costs, and what bounded memory costs."
    results = QualityResults

    model: Model = DEFAULT_MODEL
    part: Annotated[
        list[Part] | None,
        typer.Option(help="What to measure; may be given more than once. All but peer when left out."),
    ] = None
    default_choice: Annotated[
        bool,
        typer.Option(
            "--default-choice",
            help="Of the choices only the default one, which the gates judge: for large models.",
            rich_help_panel="The part choices",
        ),
    ] = False
    text: Annotated[
        Path | None,
        typer.Option(help="Plain UTF-8 text for memory and peer; the packaged one has about 2,800 tokens."),
    ] = None
    history_tokens: Annotated[int, _memory(help="How much of the text one session reads.")] = 131_072
    full_tokens: Annotated[int, _memory(help="Where full attention stops, which slows as it goes.")] = 16_384
    sliding_window: Annotated[int, _memory(help="A window without sinks.")] = 1024
    windows: Annotated[str, _memory(help="Windows beside 4 sinks, with commas.")] = "252,508,1020,2044"
    peer_tokens: Annotated[int | None, _peer(help="How much of the text is scored; all when left out.")] = (
        None
    )
    also: Annotated[
        list[Path] | None, _peer(help="A .gguf file to compare as well; may be given more than once.")
    ] = None
    quick: Quick = False
    threads: Threads = None

    far_tokens: ClassVar[int] = FAR_TOKENS

    def presets(self) -> dict[str, Any]:
        if not self.quick:
            return {}
        memory = {"history_tokens": 400, "full_tokens": 200, "sliding_window": 64, "windows": "252"}
        return {**memory, "peer_tokens": 48}

    @property
    def model_to_fetch(self) -> str | None:
        return self.model

    @property
    def parts(self) -> frozenset[Part]:
        """Those asked for; else all that need nothing else installed."""
        return frozenset(self.part or set(Part) - {Part.PEER})

    @property
    def config(self) -> EngineConfig:
        return build(EngineConfig, {"threads": self.threads})

    @property
    def choices(self) -> list[Choice]:
        return choices_to_try(only_default=self.quick or self.default_choice)

    @property
    def choice_tokens(self) -> int | None:
        """How much of the packaged text they score; None for all of it."""
        return 48 if self.quick else None

    @property
    def work_of_a_choice(self) -> int:
        """How many tokens at a prompt's usual speed take as long."""
        # The text goes through twice, once in blocks of few rows, and some choices have no quick kernel.
        return 5 * (self.choice_tokens or TEXT_TOKENS)

    @property
    def ways(self) -> list[Way]:
        """Full attention computes more for each token than for the one before, so it stops early, yet beyond
        what the default model was trained for: one sees it leave what it knows."""
        full = Way(0, min(self.full_tokens, self.history_tokens), full=True)
        return [full, Way(0, self.sliding_window), *self._with_sinks]

    @property
    def _with_sinks(self) -> list[Way]:
        return [Way(CacheConfig.sink, window) for window in numbers("windows", self.windows)]

    @property
    def judged(self) -> Way:
        """Of the ways with sinks the one nearest to what a session has by default."""
        return min(self._with_sinks, key=lambda way: abs(way.window - CacheConfig.window))

    def tokens_of(self, way: Way) -> int:
        return way.window if way.full else self.history_tokens

    @property
    def work(self) -> int:
        """How many tokens will be computed, roughly."""
        afresh = tokens_afresh(self.history_tokens, self.far_tokens, self.judged.window)
        tokens = {
            Part.CHOICES: (1 + len(self.choices)) * self.work_of_a_choice,
            Part.MEMORY: sum(map(self.tokens_of, self.ways)) + afresh,
            Part.PEER: 2 * (1 + len(self.also or ())) * self._scored_tokens,
        }
        return sum(tokens[part] for part in self.parts)

    @property
    def _scored_tokens(self) -> int:
        """Roughly how much of the text peer scores."""
        if self.text is None:
            return self.peer_tokens or TEXT_TOKENS
        return self.peer_tokens or self.text.stat().st_size // BYTES_A_TOKEN

    def check(self, *, picture: bool) -> None:
        parts = self.parts
        build(EngineConfig, {"threads": self.threads})  # which refuses what cannot be
        if picture and Part.MEMORY not in parts:
            raise ConfigError("--picture draws the part memory, which was not asked for")
        if self.default_choice and Part.CHOICES not in parts:
            raise ConfigError("--default-choice limits the part choices, which was not asked for")
        if self.also and Part.PEER not in parts:
            raise ConfigError("--also names files for the part peer, which was not asked for")
        if Part.MEMORY in parts:
            self.require_least(history_tokens=2, full_tokens=2)
            for way in self.ways:
                way.cache()
        if self.text is not None and not self.parts & {Part.MEMORY, Part.PEER}:
            raise ConfigError("--text is read by the parts memory and peer, which were not asked for")
        text = self.read_text()
        if Part.MEMORY in parts:
            self._check_length(len(text.encode()), "bytes")  # which no tokenizer makes more of
        if Part.PEER in parts:
            self._check_peer()

    def _check_peer(self) -> None:
        require_llama(asked_by=ASKED_BY)
        self.require_least(peer_tokens=2)
        for path in self.also or ():
            require_llama(str(path), asked_by=ASKED_BY)
            if not path.is_file():
                raise ConfigError(f"{ASKED_BY} compares files, and there is none at {path}")

    def _check_length(self, length: int, unit: str) -> None:
        """A history never begins again. Raises ConfigError."""
        if length < self.history_tokens:
            raise ConfigError(
                f"history-tokens is {self.history_tokens:,}, and the text has only {length:,} {unit}; "
                "ask for less, or give a longer text with --text FILE"
            )

    def read_text(self) -> str:
        """What memory and peer read. Raises ConfigError for what is no UTF-8."""
        if self.text is None:
            return prose()
        try:
            return self.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the text {self.text} cannot be read as UTF-8: {error}") from error

    def run(self, run: Run[QualityResults]) -> QualityResults:
        """A partial report follows each choice, way, memory and file."""
        run.facts |= {"engine": self.config, "parts": self.parts, "text": None}
        if Part.CHOICES in self.parts:
            run.facts["choices"] = FACTS
        token_ids: list[int] = []
        if self.parts & {Part.MEMORY, Part.PEER}:
            text = self.read_text()
            run.facts["text"] = {
                "file": "bench/data/galapagos.txt" if self.text is None else self.text.name,
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
                "characters": len(text),
            }
            if Part.MEMORY in self.parts:
                token_ids = self._tokens(text)
                run.facts["text"]["tokens"] = len(token_ids)
        results, work = QualityResults(), run.work(self.work)
        for measure in (_MEASURES[part] for part in Part if part in self.parts):
            for found in measure(self, token_ids, work):
                results = replace(results, **found)
                run.checkpoint(results)
        return results

    def _tokens(self, text: str) -> list[int]:
        """Raises ConfigError for a text shorter than what should be read of it."""
        with open_alone(self, CacheConfig(sink=0, window=1)) as runtime:
            token_ids = runtime.tokenizer.encode(text, special=False)
        self._check_length(len(token_ids), "tokens")
        return token_ids

    def gates(self, results: QualityResults) -> list[Gate]:
        """Those of the parts that were measured."""
        return [gate for part in results.parts() for gate in part.gates()]

    @staticmethod
    def show(results: QualityResults) -> list[Table | Chart]:
        return [each for part in results.parts() for each in part.show()]

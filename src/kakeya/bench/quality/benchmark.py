"""`kakeya bench quality`: its flags. What it measures is in `measure`, what it concludes in `results`."""

import hashlib
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from kakeya.bench.benchmark import Benchmark, Quick, Run, numbers
from kakeya.bench.quality.results import (
    DEFAULT,
    FAR_TOKENS,
    REFERENCE,
    STRETCH_TOKENS,
    Choice,
    QualityResults,
    Way,
    all_choices,
    far_stretches,
    quality_gates,
    show,
)
from kakeya.bench.report import Gate
from kakeya.bench.text import prose
from kakeya.config import DEFAULT_MODEL, CacheConfig, EngineConfig
from kakeya.errors import ConfigError
from kakeya.options import Model, Threads

_memory = partial(typer.Option, rich_help_panel="The part memory")
_recall = partial(typer.Option, rich_help_panel="The part recall")
_peer = partial(typer.Option, rich_help_panel="The part peer")

# How many tokens are computed at once, for each way of feeding the text.
BLOCKS = {"prompt": 128, "decode": 8}
PASSAGE_TOKENS = 512
ASKED_BY = "--part peer"
# Roughly what the packaged text has.
TEXT_TOKENS = 3000
# More than a number, the question and the prose before it take.
AROUND_TOKENS = 512
# A prefix with the number in it must fit, whatever the tokenizer.
LEAST_KEPT = 256


class Part(StrEnum):
    """What there is to measure: arithmetic, long histories, recall of what was said, llama.cpp beside us."""

    CHOICES = "choices"
    MEMORY = "memory"
    RECALL = "recall"
    PEER = "peer"


# Those that need nothing else installed.
_USUAL = (Part.CHOICES, Part.MEMORY, Part.RECALL)


@dataclass(frozen=True)
class QualityBench(Benchmark[QualityResults]):
    """The model, the text that is read at length, and the parts to measure."""

    kind = "quality"
    title = "Quality benchmark"
    help = "What arithmetic costs, what bounded memory costs, and what it keeps."
    results = QualityResults

    model: Model = DEFAULT_MODEL
    part: Annotated[
        list[Part] | None,
        typer.Option(help="What to measure; may be given more than once. All but peer when left out."),
    ] = None
    text: Annotated[
        Path | None,
        typer.Option(help="Plain UTF-8 text for memory and recall; the packaged one has about 2,800 tokens."),
    ] = None
    history_tokens: Annotated[int, _memory(help="How much of the text one session reads.")] = 131_072
    full_tokens: Annotated[int, _memory(help="Where full attention stops, which slows as it goes.")] = 16_384
    sliding_window: Annotated[int, _memory(help="A window without sinks.")] = 1024
    windows: Annotated[
        str, _memory(help="Windows beside 4 sinks, with commas; recall has the nearest to the default.")
    ] = "252,508,1020,2044"
    distances: Annotated[str, _recall(help="Tokens between number and question, with commas.")] = (
        "128,256,512,900,1500,3000,6000"
    )
    trials: Annotated[int, _recall(help="How often at each distance.")] = 10
    seed: Annotated[int, _recall(help="Which numbers in which prose.")] = 0
    peer_tokens: Annotated[
        int | None, _peer(help="How much of the packaged text is scored; all when left out.")
    ] = None
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
        return {**memory, "distances": "32,400", "trials": 1, "peer_tokens": 48}

    @property
    def model_to_fetch(self) -> str | None:
        return self.model

    @property
    def parts(self) -> frozenset[Part]:
        return frozenset(self.part or _USUAL)

    @property
    def config(self) -> EngineConfig:
        return EngineConfig() if self.threads is None else EngineConfig(threads=self.threads)

    # What each part measures.

    @property
    def choices(self) -> list[Choice]:
        return [DEFAULT] if self.quick else all_choices()

    @property
    def choice_tokens(self) -> int | None:
        """How much of the packaged text they score; None for all of it."""
        return 48 if self.quick else None

    @property
    def choice_passage(self) -> int:
        return 32 if self.quick else PASSAGE_TOKENS

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
        return [full, Way(0, self.sliding_window), *(Way(CacheConfig.sink, each) for each in self._windows)]

    def tokens_of(self, way: Way) -> int:
        return way.window if way.full else self.history_tokens

    @property
    def _windows(self) -> tuple[int, ...]:
        return numbers("windows", self.windows)

    @property
    def judged(self) -> Way:
        """Of the ways with sinks the one nearest to what a session has by default."""
        return Way(CacheConfig.sink, min(self._windows, key=lambda each: abs(each - CacheConfig.window)))

    @property
    def distances_asked(self) -> tuple[int, ...]:
        return numbers("distances", self.distances)

    @property
    def forgets_nothing(self) -> Way:
        """A window that forgets nothing of the longest talk."""
        return Way(0, max(self.distances_asked) + AROUND_TOKENS, full=True)

    @property
    def work(self) -> int:
        """How many tokens will be computed, roughly."""
        afresh = len(far_stretches(self.history_tokens, self.far_tokens))
        memory = sum(map(self.tokens_of, self.ways)) + afresh * (self.judged.window + STRETCH_TOKENS)
        tokens = {
            Part.CHOICES: (1 + len(self.choices)) * self.work_of_a_choice,
            Part.MEMORY: memory,
            Part.RECALL: 3 * self.trials * sum(self.distances_asked),
            Part.PEER: 2 * (1 + len(self.also or ())) * (self.peer_tokens or TEXT_TOKENS),
        }
        return sum(tokens[part] for part in self.parts)

    # What cannot be.

    def check(self, *, picture: bool) -> None:
        if picture and Part.MEMORY not in self.parts:
            raise ConfigError("--picture draws the part memory, which was not asked for")
        if self.threads is not None:
            EngineConfig(threads=self.threads)
        if Part.MEMORY in self.parts:
            self._check_memory()
        if Part.RECALL in self.parts:
            self._check_recall()
        if self.reads_at_length:
            self.check_length(len(self._long_text.encode()), "bytes")  # which no tokenizer makes more of
        if Part.PEER in self.parts:
            self._check_peer()
        elif self.also:
            raise ConfigError("--also names files for the part peer, which was not asked for")

    def _check_memory(self) -> None:
        for name in ("history_tokens", "full_tokens"):
            if getattr(self, name) < 2:
                raise ConfigError(f"{name} must be at least 2, got {getattr(self, name)}")
        for way in self.ways:
            CacheConfig(sink=way.sink, window=way.window)

    def _check_recall(self) -> None:
        if min(self.distances_asked) < 1:
            raise ConfigError(f"distances must be whole numbers from 1, got {list(self.distances_asked)}")
        if self.trials < 1:
            raise ConfigError(f"trials must be at least 1, got {self.trials}")
        if CacheConfig(sink=self.judged.sink, window=self.judged.window).capacity < LEAST_KEPT:
            raise ConfigError(
                f"recall needs a memory of at least {LEAST_KEPT} tokens to pin a number in, "
                f"got {self.judged.label()}"
            )

    def _check_peer(self) -> None:
        from kakeya.bench.peers.llama import require_llama

        require_llama(asked_by=ASKED_BY)
        if self.peer_tokens is not None and self.peer_tokens < 2:
            raise ConfigError(f"peer-tokens must be at least 2, got {self.peer_tokens}")
        for path in self.also or ():
            require_llama(str(path), asked_by=ASKED_BY)
            if not path.is_file():
                raise ConfigError(f"{ASKED_BY} compares files, and there is none at {path}")

    # The text that is read at length.

    @property
    def reads_at_length(self) -> bool:
        return bool(self.parts & {Part.MEMORY, Part.RECALL})

    def check_length(self, length: int, unit: str) -> None:
        """Neither a history nor the prose before a question begins again. Raises ConfigError."""
        history = self.history_tokens if Part.MEMORY in self.parts else 0
        farthest = max(self.distances_asked) if Part.RECALL in self.parts else 0
        if length < max(history, farthest):
            asked = "history-tokens" if history >= farthest else "the longest distance"
            raise ConfigError(
                f"{asked} is {max(history, farthest):,}, and the text has only {length:,} {unit}; "
                "ask for less, or give a longer text with --text FILE"
            )

    @property
    def _long_text(self) -> str:
        """Raises ConfigError for what cannot be read as UTF-8."""
        if self.text is None:
            return prose()
        try:
            return self.text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the text {self.text} cannot be read as UTF-8: {error}") from error

    # The run.

    def run(self, run: Run[QualityResults]) -> QualityResults:
        """A partial report follows each choice, way, memory and file."""
        from kakeya.bench.quality.measure import measure, text_tokens

        run.facts |= {"engine": self.config, "parts": self.parts, "text": None}
        if Part.CHOICES in self.parts:
            run.facts["choices"] = {"rows_at_once": BLOCKS, "reference": REFERENCE.label()}
        token_ids: list[int] = []
        if self.reads_at_length:
            text = self._long_text
            token_ids = text_tokens(self, text)
            run.facts["text"] = {
                "file": "bench/data/galapagos.txt" if self.text is None else self.text.name,
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
                "characters": len(text),
                "tokens": len(token_ids),
            }
        results = QualityResults()
        for found in measure(self, token_ids, run.work(self.work)):
            results = replace(results, **found)
            run.checkpoint(results)
        return results

    def gates(self, results: QualityResults) -> list[Gate]:
        return quality_gates(results)

    show = staticmethod(show)

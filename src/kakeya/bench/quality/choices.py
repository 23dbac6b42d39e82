"""The part choices: what arithmetic costs, beside float32 weights of the same file.

Each choice scores the same text once fed in blocks of many rows, as prompts are, and once in blocks of few,
as decoding is: the matmuls may take different paths.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from kakeya.bench.benchmark import Work
from kakeya.bench.quality.scoring import PASSAGE_TOKENS, Found, cut, open_alone, perplexity
from kakeya.bench.report import Gate, at_least, at_most
from kakeya.bench.tables import Chart, Column, Table, over
from kakeya.bench.text import prose
from kakeya.errors import ConfigError
from kakeya.types import DType, KernelChoice, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

    from kakeya.bench.quality.benchmark import QualityBench
    from kakeya.runtime import Runtime

    # A passage and the reference's log-probabilities for it [n, vocab].
    Passage = tuple[list[int], Tensor]

# How many tokens are computed at once, for each way of feeding the text.
BLOCKS = {"prompt": 128, "decode": 8}
POSITIONS_NEEDED = 2000
# What the default settings may cost.
DEFAULT_KL_LIMIT, DEFAULT_AGREEMENT_LIMIT = 0.01, 0.95


@dataclass(frozen=True)
class Choice:
    """One way to hold the weights and compute with them."""

    dtype: DType
    weights: WeightFormat
    kernels: KernelChoice

    def label(self) -> str:
        return f"{self.dtype} / {self.weights} / {self.kernels}"


REFERENCE = Choice(DType.FLOAT32, WeightFormat.FLOAT32, KernelChoice.TORCH)
DEFAULT = Choice(DType.BFLOAT16, WeightFormat.AUTO, KernelChoice.AUTO)


FACTS = {"rows_at_once": BLOCKS, "reference": REFERENCE.label()}


def choices_to_try(*, only_default: bool) -> list[Choice]:
    """The defaults, then every combination but the reference."""
    chosen = () if only_default else (KernelChoice.NATIVE, KernelChoice.TORCH)
    every = [
        Choice(dtype, weights, kernels) for kernels in chosen for dtype in DType for weights in WeightFormat
    ]
    return [DEFAULT, *(choice for choice in every if choice != REFERENCE)]


@dataclass(frozen=True)
class Scores:
    """Means over the scored positions; None where there are none."""

    positions: int = 0
    mean_kl: float | None = None
    top1_agreement: float | None = None
    perplexity: float | None = None


@dataclass(frozen=True)
class ChoiceRow(Choice):
    """A choice, what the loader made of it and how each way of feeding it fared, or why it was refused."""

    held_as: str | None = None
    refused: str | None = None
    prompt: Scores | None = None
    decode: Scores | None = None


_COLUMNS = [
    *(Column(name, name) for name in ("dtype", "weights", "kernels")),
    Column("held as", lambda row: f"not here: {row.refused}" if row.refused else row.held_as),
    Column("KL, decode", "decode.mean_kl", form=".2e"),
    Column("KL, prompt", "prompt.mean_kl", form=".2e"),
    Column("top-1", "decode.top1_agreement", form=".2%"),
    Column("perplexity", "decode.perplexity", form=".3f"),
]


@dataclass(frozen=True)
class ChoiceResults:
    """A row for each choice that was tried."""

    reference: Scores
    rows: Sequence[ChoiceRow]

    def gates(self) -> list[Gate]:
        """Enough text for a verdict, and a limit on what the defaults cost in decoding."""
        default = next((row.decode for row in self.rows if row.label() == DEFAULT.label()), None) or Scores()
        absent = f"needs {POSITIONS_NEEDED:,} positions, got {default.positions:,}"
        scores = default if default.positions >= POSITIONS_NEEDED else Scores()
        kl, agreement = "mean KL divergence of the default choice", "top-1 agreement of the default choice"
        return [
            at_most(kl, scores.mean_kl, DEFAULT_KL_LIMIT, absent=absent),
            at_least(agreement, scores.top1_agreement, DEFAULT_AGREEMENT_LIMIT, absent=absent),
        ]

    def show(self) -> Iterator[Table | Chart]:
        """One line a choice, and one chart for each (dtype, kernels) with the weight formats side by side."""
        exact = Scores(self.reference.positions, 0.0, 1.0, self.reference.perplexity)
        first = ChoiceRow(**vars(REFERENCE), held_as="the reference", prompt=exact, decode=exact)
        yield Table("Against float32 weights of the same file", _COLUMNS, [first, *self.rows], labels=4)
        had = [row for row in self.rows if not row.refused]
        series = {"decode": "decode.mean_kl", "prompt": "prompt.mean_kl"}
        for name, group in groupby(had, lambda row: f"{row.dtype}, {row.kernels} kernels"):
            rows = list(group)
            at = [row.weights for row in rows]
            yield over(f"KL divergence, {name}", "mean KL", name, at, rows, series, bars=True)


def measure_choices(bench: "QualityBench", token_ids: Sequence[int], work: Work) -> Found:
    """A choice that cannot be had here is reported as refused, with the reason."""
    work.begin(f"reference: {REFERENCE.label()}")
    with _opened(bench, REFERENCE, BLOCKS["prompt"]) as runtime:
        tokens = runtime.tokenizer.encode(prose())[: bench.choice_tokens]
        # Without what a document begins with, some models are lost, and any error sends them elsewhere.
        start = runtime.tokenizer.encode("", bos=True)
        texts = [[*start, *passage] for passage in cut(tokens, PASSAGE_TOKENS)]
        passages = [(text, runtime.score(text).log_softmax(dim=-1)) for text in texts]
    reference = compare(passages, [logits for _, logits in passages])
    work.advance(bench.work_of_a_choice)
    rows: list[ChoiceRow] = []
    for choice in bench.choices:
        work.begin(choice.label())
        try:
            rows.append(_scored(bench, choice, passages))
        except ConfigError as error:
            rows.append(ChoiceRow(**vars(choice), refused=str(error)))
        work.advance(bench.work_of_a_choice)
        yield {"reference": reference, "choices": tuple(rows)}


def _scored(bench: "QualityBench", choice: Choice, passages: "Sequence[Passage]") -> ChoiceRow:
    found: dict[str, Any] = {}
    for fed, block in BLOCKS.items():
        with _opened(bench, choice, block) as runtime:
            found["held_as"] = runtime.describe().weights
            found[fed] = compare(passages, (runtime.score(text) for text, _ in passages))
    return ChoiceRow(**vars(choice), **found)


def _opened(bench: "QualityBench", choice: Choice, block: int) -> "Runtime":
    return open_alone(bench, bench.config.cache, **vars(choice), prefill_block=block)


def compare(passages: "Sequence[Passage]", logits: "Iterable[Tensor]") -> Scores:
    """Next-token distributions [n, vocab] beside the reference's, over all passages."""
    positions, divergence, agreements = 0, 0.0, 0
    nats: list[float] = []
    for (text, reference), found in zip(passages, logits, strict=True):
        scores = found.log_softmax(dim=-1)
        positions += len(text)
        divergence += float((reference.exp() * (reference - scores)).sum(dim=-1).double().sum())
        agreements += int((reference.argmax(dim=-1) == scores.argmax(dim=-1)).sum())
        nats += (-scores[list(range(len(text) - 1)), text[1:]]).tolist()
    if not positions:
        return Scores()
    return Scores(positions, divergence / positions, agreements / positions, perplexity(nats))

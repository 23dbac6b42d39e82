"""`kakeya bench quality`: what each choice of dtype, weights and kernels costs in next-token distributions.

Each choice scores the same text through the real engine, once fed in blocks of many rows, as prompts are,
and once in blocks of few, as decoding is: the products may take different paths.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kakeya.bench.machine import machine_facts, public_name
from kakeya.bench.prose import prose
from kakeya.bench.quality_results import (
    REFERENCE,
    Choice,
    Tally,
    all_choices,
    choice_row,
    quality_gates,
    refused_row,
)
from kakeya.bench.report import Report, now
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError
from kakeya.runtime import Runtime

# How many tokens are computed at once, for each way of feeding the text.
BLOCKS = {"prompt": 128, "decode": 8}


@dataclass(frozen=True)
class QualityBench:
    """The model, the engine's other settings, the choices, and how much text in passages of what size."""

    model: str
    config: EngineConfig
    choices: tuple[Choice, ...] = tuple(all_choices())
    passage_tokens: int = 512
    most_tokens: int | None = None

    @property
    def pieces_of_work(self) -> int:
        """How many times `run` will call `announce`."""
        return 1 + len(self.choices)


def run(
    bench: QualityBench, announce: Callable[[str], None], checkpoint: Callable[[Report], object]
) -> Report:
    """Score the text with the reference and with every choice, and return the finished report.

    `announce` is called with each choice as it begins, `checkpoint` with a partial report after each.
    A choice that cannot be had here is reported as refused, with the reason.
    """
    announce(f"reference: {REFERENCE.label}")
    passages, references, perplexity = _reference(bench)
    report = Report("quality", _settings(bench, passages), machine_facts())
    rows: list[dict[str, Any]] = []
    for choice in bench.choices:
        announce(choice.label)
        rows.append(_row(bench, choice, passages, references))
        report = replace(report, results={"reference": perplexity, "choices": rows})
        checkpoint(report)
    return replace(report, gates=quality_gates(report.results), finished_at=now())


def _reference(bench: QualityBench) -> tuple[list[list[int]], list[Tensor], dict[str, Any]]:
    """The passages, the reference's log-probabilities for each [n, vocab], and its own scores."""
    with _runtime(bench, REFERENCE, BLOCKS["prompt"]) as runtime:
        tokens = runtime.tokenizer.encode(prose())[: bench.most_tokens]
        passages = cut(tokens, bench.passage_tokens)
        references = [torch.log_softmax(runtime.score(passage), dim=-1) for passage in passages]
    tallies = (compare(reference, reference, p) for reference, p in zip(references, passages, strict=True))
    return passages, references, _sum(tallies).to_dict()


def _row(
    bench: QualityBench, choice: Choice, passages: Sequence[list[int]], references: Sequence[Tensor]
) -> dict[str, Any]:
    tallies, held_as = {}, ""
    for fed, block in BLOCKS.items():
        try:
            runtime = _runtime(bench, choice, block)
        except ConfigError as error:
            return refused_row(choice, str(error))
        with runtime:
            held_as = runtime.describe().weights
            pairs = zip(references, passages, strict=True)
            tallies[fed] = _sum(compare(reference, runtime.score(p), p) for reference, p in pairs)
    return choice_row(choice, held_as, tallies)


def _runtime(bench: QualityBench, choice: Choice, block: int) -> Runtime:
    config = replace(
        bench.config,
        dtype=choice.dtype,
        weights=choice.weights,
        kernels=choice.kernels,
        prefill_block=block,
        capacity=1,
    )
    return Runtime.open(bench.model, config)


def cut(token_ids: Sequence[int], size: int) -> list[list[int]]:
    """The text in passages of `size` tokens; the last one may be shorter."""
    return [list(token_ids[start : start + size]) for start in range(0, len(token_ids), size)]


def compare(reference: Tensor, logits: Tensor, passage: Sequence[int]) -> Tally:
    """Compare two next-token distributions: the reference's log-probabilities and logits, both [n, vocab]."""
    scores = torch.log_softmax(logits, dim=-1)
    divergence = (reference.exp() * (reference - scores)).sum(dim=-1)
    agreements = (reference.argmax(dim=-1) == scores.argmax(dim=-1)).sum()
    following = torch.tensor(passage[1:], dtype=torch.int64)
    surprise = -scores[:-1].gather(1, following[:, None]).sum(dtype=torch.float64)
    return Tally(
        positions=len(passage),
        divergence=float(divergence.sum(dtype=torch.float64)),
        agreements=int(agreements),
        predicted=len(passage) - 1,
        surprise=float(surprise),
    )


def _sum(tallies: Iterable[Tally]) -> Tally:
    return sum(tallies, start=Tally())


def _settings(bench: QualityBench, passages: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {
        "model": public_name(bench.model),
        "text": "bench/data/galapagos.txt",
        "tokens": sum(map(len, passages)),
        "passage_tokens": bench.passage_tokens,
        "rows_at_once": BLOCKS,
        "reference": REFERENCE.label,
        "engine": asdict(bench.config),
    }

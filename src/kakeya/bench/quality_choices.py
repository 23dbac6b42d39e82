"""The part `choices` of `bench quality`: what dtype, weights and kernels cost in next-token distributions.

Each choice scores the same text through the real engine, once fed in blocks of many rows, as prompts are,
and once in blocks of few, as decoding is: the products may take different paths.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kakeya.bench.prose import prose
from kakeya.bench.quality_results import (
    REFERENCE,
    Choice,
    Tally,
    all_choices,
    choice_row,
    refused_row,
)
from kakeya.bench.work import Work
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError
from kakeya.runtime import Runtime

# How many tokens are computed at once, for each way of feeding the text.
BLOCKS = {"prompt": 128, "decode": 8}
# Roughly what the packaged text has.
TEXT_TOKENS = 3000


@dataclass(frozen=True)
class ChoicesBench:
    """The choices, and how much text in passages of what size."""

    choices: tuple[Choice, ...] = tuple(all_choices())
    passage_tokens: int = 512
    most_tokens: int | None = None

    @property
    def work(self) -> int:
        """How many tokens at a prompt's usual speed take as long as this."""
        return (1 + len(self.choices)) * self.work_of_one

    @property
    def work_of_one(self) -> int:
        # The text goes through twice, once in blocks of few rows, and some choices have no quick kernel.
        return 5 * (TEXT_TOKENS if self.most_tokens is None else self.most_tokens)

    @property
    def settings(self) -> dict[str, Any]:
        """As a report has them."""
        return {
            "text": "bench/data/galapagos.txt",
            "passage_tokens": self.passage_tokens,
            "rows_at_once": BLOCKS,
            "reference": REFERENCE.label,
        }


def measure(model: str, config: EngineConfig, bench: ChoicesBench, work: Work) -> Iterator[dict[str, Any]]:
    """Score the text with the reference and with every choice; the results so far after each.

    A choice that cannot be had here is reported as refused, with the reason.
    """
    work.begin(f"reference: {REFERENCE.label}")
    passages, references, perplexity = _reference(model, config, bench)
    work.advance(bench.work_of_one)
    rows: list[dict[str, Any]] = []
    for choice in bench.choices:
        work.begin(choice.label)
        rows.append(_row(model, config, choice, passages, references))
        work.advance(bench.work_of_one)
        yield {"reference": perplexity, "choices": list(rows)}


def _reference(
    model: str, config: EngineConfig, bench: ChoicesBench
) -> tuple[list[list[int]], list[Tensor], dict[str, Any]]:
    """The passages, the reference's log-probabilities for each [n, vocab], and its own scores."""
    with _runtime(model, config, REFERENCE, BLOCKS["prompt"]) as runtime:
        tokens = runtime.tokenizer.encode(prose())[: bench.most_tokens]
        passages = cut(tokens, bench.passage_tokens)
        references = [torch.log_softmax(runtime.score(passage), dim=-1) for passage in passages]
    tallies = (compare(reference, reference, p) for reference, p in zip(references, passages, strict=True))
    return passages, references, _sum(tallies).to_dict()


def _row(
    model: str,
    config: EngineConfig,
    choice: Choice,
    passages: Sequence[list[int]],
    references: Sequence[Tensor],
) -> dict[str, Any]:
    tallies, held_as = {}, ""
    for fed, block in BLOCKS.items():
        try:
            runtime = _runtime(model, config, choice, block)
        except ConfigError as error:
            return refused_row(choice, str(error))
        with runtime:
            held_as = runtime.describe().weights
            pairs = zip(references, passages, strict=True)
            tallies[fed] = _sum(compare(reference, runtime.score(p), p) for reference, p in pairs)
    return choice_row(choice, held_as, tallies)


def _runtime(model: str, config: EngineConfig, choice: Choice, block: int) -> Runtime:
    chosen = replace(
        config,
        dtype=choice.dtype,
        weights=choice.weights,
        kernels=choice.kernels,
        prefill_block=block,
        capacity=1,
    )
    return Runtime.open(model, chosen)


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

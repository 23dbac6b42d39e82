"""What the model thinks of a given text, block by block, so that a long one takes no more memory."""

from collections.abc import Generator, Sequence as Tokens
from contextlib import closing
from typing import TYPE_CHECKING

from torch import Tensor

from kakeya.engine.logits import LogProbs
from kakeya.errors import InvalidArgument
from kakeya.types import TokenEvent

if TYPE_CHECKING:
    from kakeya.engine.engine import Engine


def score_blocks(
    engine: "Engine", token_ids: Tokens[int], pinned: int | None = None
) -> Generator[Tensor, None, None]:
    """Next-token logits after each token, a canonical block at a time [rows, vocab], on a slab of its own."""
    if not token_ids:
        raise InvalidArgument("cannot score zero tokens")
    sequence = engine.open("score", (), pinned)
    try:
        engine.append(sequence, token_ids)
        scored = 0
        while scored < len(token_ids):
            block = engine.score_next(sequence)
            scored += len(block)
            yield block
    finally:
        engine.close(sequence)


def score_tokens(
    engine: "Engine", token_ids: Tokens[int], top: int
) -> Generator[list[TokenEvent], None, None]:
    """The tokens with their log-probabilities and the `top` most probable ones in their place, some at a
    time. Nothing comes before the first token, so it has none."""
    upcoming = iter(token_ids)
    told = [TokenEvent(token_id) for token_id in token_ids[:1]]
    next(upcoming, None)
    with closing(score_blocks(engine, token_ids)) as blocks:
        for block in blocks:
            rows = (LogProbs(row) for row in block.float().numpy())
            told += [
                TokenEvent(token_id, row.of(token_id).logprob, row.top(top))
                for row, token_id in zip(rows, upcoming, strict=False)
            ]
            yield told
            told = []

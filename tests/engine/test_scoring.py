"""Scoring in blocks: the same numbers as all at once, and a slab that is given back on every path."""

import pytest

from kakeya.errors import InvalidArgument
from kakeya.runtime import Runtime


def text(runtime: Runtime, length: int) -> list[int]:
    return [(7 * at + at * at) % runtime.model_config.vocab_size for at in range(length)]


def test_blocks_add_up(open_tiny: object) -> None:
    with open_tiny() as runtime:  # type: ignore[operator]
        tokens = text(runtime, 45)
        logprobs = runtime.score(tokens).double().log_softmax(-1)
        blocks = list(runtime.score_tokens(tokens, 3))
        assert len(blocks) == 6, "a block of the prompt at a time"
        events = [event for block in blocks for event in block]
        assert [event.token_id for event in events] == tokens
        assert events[0].logprob is None
        for at, event in enumerate(events[1:]):
            assert event.logprob == pytest.approx(float(logprobs[at, event.token_id]), abs=1e-9)
            best = logprobs[at].topk(3)
            assert [top.token_id for top in event.top_logprobs] == best.indices.tolist()
        assert runtime.free_slabs == runtime.describe().capacity


def test_whoever_leaves_early_leaves_no_slab_behind(open_tiny: object) -> None:
    with open_tiny() as runtime:  # type: ignore[operator]
        blocks = runtime.score_tokens(text(runtime, 45))
        next(blocks)
        assert runtime.free_slabs == runtime.describe().capacity - 1
        blocks.close()
        assert runtime.free_slabs == runtime.describe().capacity


@pytest.mark.parametrize("tokens, reason", [([], "zero tokens"), ([5, 9999], "vocabulary")])
def test_bad_tokens_are_refused(open_tiny: object, tokens: list[int], reason: str) -> None:
    with open_tiny() as runtime:  # type: ignore[operator]
        with pytest.raises(InvalidArgument, match=reason):
            list(runtime.score_tokens(tokens))
        assert runtime.free_slabs == runtime.describe().capacity

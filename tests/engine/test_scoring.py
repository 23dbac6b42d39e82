"""Scoring in blocks: the same numbers as all at once, and a slab that is given back on every path."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies as st

from kakeya.engine.engine import Engine
from kakeya.engine.logits import LogProbs
from kakeya.engine.scoring import best_tokens, score_tokens
from kakeya.errors import InvalidArgument
from kakeya.runtime import Runtime
from kakeya.types import Numerics, TokenEvent
from support import tiny
from support.tiny import make_device_backend

TOKENS = [(7 * at + at * at) % tiny.VOCAB for at in range(45)]


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


def told(engine: Engine, tokens: list[int], top: int) -> list[TokenEvent]:
    return [event for some in score_tokens(engine, tokens, top) for event in some]


@pytest.fixture(params=Numerics)
def device_engine(tiny_llama: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Its head takes two rows at a time."""
    config = tiny.engine_config(numerics=request.param)
    backend = make_device_backend(tiny_llama, config)
    backend._head_rows = 2
    engine = Engine(backend, config).start()
    yield engine
    engine.shutdown()


def test_a_device_keeps_its_logits(device_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back is as large as what was asked, and what `LogProbs` says of the same logits."""
    logits = device_engine.score(TOKENS)
    sizes = []
    score_next = device_engine.score_next

    def watched(*asked: object) -> list[object]:
        parts = score_next(*asked)
        sizes.extend(part.ids.numel() + part.logprobs.numel() for part in parts)
        return parts

    monkeypatch.setattr(device_engine, "score_next", watched)
    events = told(device_engine, TOKENS, 3)
    assert [event.token_id for event in events] == TOKENS
    for row, event in zip(logits.numpy(), events[1:], strict=False):
        expected = LogProbs(row)
        assert event.logprob == pytest.approx(expected.of(event.token_id).logprob, abs=1e-12)
        assert [each.token_id for each in event.top_logprobs] == [each.token_id for each in expected.top(3)]
        best = [each.logprob for each in expected.top(3)]
        assert [each.logprob for each in event.top_logprobs] == pytest.approx(best, abs=1e-12)
    assert len(sizes) > len(TOKENS) // 2
    assert max(sizes) == 2 * 2 * (1 + 3)


def test_a_reduction_sees_every_row_once_in_order(device_engine: Engine) -> None:
    sequence = device_engine.open("someone", [])
    device_engine.append(sequence, TOKENS[:19])
    seen = []
    while sequence.slab.written < 19:
        seen += device_engine.score_next(sequence, lambda position, logits: (position, logits.clone()))
    assert [position for position, _ in seen] == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18]
    assert torch.equal(torch.cat([logits for _, logits in seen]), device_engine.score(TOKENS[:19]))


@pytest.mark.parametrize("length", [1, 2, 8, 9, 30])
@pytest.mark.parametrize("computer", tiny.COMPUTERS)
def test_in_exact_numerics_what_follows_changes_no_bit(tiny_llama: Path, computer: str, length: int) -> None:
    config = tiny.engine_config(numerics=Numerics.EXACT, **tiny.COMPUTERS[computer])
    engine = tiny.make_engine(tiny.load(tiny_llama, config), config)
    whole = told(engine, TOKENS, 5)
    assert told(engine, TOKENS[:length], 5) == whole[:length]
    assert told(engine, TOKENS, 0)[7].logprob == whole[7].logprob
    assert all(len(event.top_logprobs) == tiny.VOCAB for event in told(engine, TOKENS, 99)[1:])
    engine.shutdown()


few_numbers = st.sampled_from([0.0, -0.0, 1.5, -1.5, 1e-45, -1e-45, 3e38, -3e38, float("-inf")])


@given(
    st.lists(few_numbers | st.floats(width=32, allow_nan=False), min_size=1, max_size=30), st.integers(0, 9)
)
def test_the_best_are_in_order_and_of_equal_ones_the_lower(row: list[float], count: int) -> None:
    expected = sorted(range(len(row)), key=lambda each: (-row[each], each))[:count]
    assert best_tokens(torch.tensor([row, row[::-1]]), count)[0].tolist() == expected

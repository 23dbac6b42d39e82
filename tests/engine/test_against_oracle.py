"""The engine against whole-history recomputation, past the wrap and back again."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from kakeya.config import CacheConfig
from kakeya.engine.engine import Engine
from kakeya.engine.sequence import TokenSequence
from kakeya.types import Numerics
from support import tiny
from support.engines import say
from support.reference import Oracle

# (sink, window, pinned, spare)
SETTINGS = [
    (2, 8, None, 4),
    (0, 8, None, 4),
    (4, 1, None, 4),
    (0, 1, None, 0),
    (2, 9, 7, 3),
    (3, 6, 0, 4),
    (2, 8, None, 0),
    (1, 12, 12, 2),
]


def history(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, tiny.VOCAB, (length,), generator=generator).tolist()


@pytest.mark.unwatched
@pytest.mark.parametrize("computer", tiny.COMPUTERS)
@pytest.mark.parametrize("numerics", list(Numerics))
@pytest.mark.parametrize(("sink", "window", "pinned", "spare"), SETTINGS)
def test_logits_agree_past_three_wraps(
    tiny_llama: Path,
    oracle: Oracle,
    sink: int,
    window: int,
    pinned: int | None,
    spare: int,
    numerics: Numerics,
    computer: str,
) -> None:
    config = tiny.engine_config(sink, window, spare, numerics=numerics, **tiny.COMPUTERS[computer])
    tokens = history(config.cache.capacity + 3 * (window + spare) + 5)
    kept = sink if pinned is None else pinned
    expected = oracle.logits(tokens, kept, config.cache.capacity - kept)
    engine = tiny.make_engine(tiny.load(tiny_llama, config), config)
    try:
        computed = engine.score(tokens, pinned)
    finally:
        engine.shutdown()
    assert (computed - expected).abs().max() < 1e-3
    assert torch.equal(computed.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("computer", tiny.COMPUTERS)
def test_a_prompt_longer_than_the_capacity_in_one_chunk(
    tiny_llama: Path, oracle: Oracle, computer: str
) -> None:
    config = tiny.engine_config(prefill_block=256, max_batch_tokens=256, **tiny.COMPUTERS[computer])
    tokens = history(90)
    engine = tiny.make_engine(tiny.load(tiny_llama, config), config)
    try:
        assert (engine.score(tokens) - oracle.logits(tokens, 2, 8)).abs().max() < 1e-3
        sequence = engine.open("someone", [])
        assert say(engine, sequence, tokens, 6) == oracle.greedy(tokens, 6, 2, 8)
    finally:
        engine.shutdown()


def test_the_oracle_itself_is_plain_causal_attention_before_the_wrap(oracle: Oracle) -> None:
    tokens = history(12)
    assert torch.equal(oracle.logits(tokens, 2, 10), oracle.logits(tokens, 0, 500))
    assert not torch.allclose(oracle.logits(tokens, 2, 8)[-1], oracle.logits(tokens, 2, 500)[-1])


turns = st.lists(
    st.tuples(st.lists(st.integers(2, tiny.VOCAB - 1), min_size=1, max_size=20), st.integers(1, 9)),
    min_size=1,
    max_size=5,
)


@pytest.mark.unwatched
@settings(max_examples=25)
@given(turns=turns, cache=st.sampled_from([(2, 8, 4), (0, 3, 1), (3, 1, 0), (1, 5, 16)]))
def test_random_conversations_give_the_oracles_tokens(
    turns: list[tuple[list[int], int]], cache: tuple[int, int, int], decoder: tiny.Model, oracle: Oracle
) -> None:
    sink, window, spare = cache
    engine = tiny.make_engine(decoder, tiny.engine_config(sink, window, spare))
    try:
        sequence, spoken = engine.open("someone", []), []
        for message, count in turns:
            answer = say(engine, sequence, message, count)
            assert answer == oracle.greedy([*spoken, *message], count, sink, window)
            spoken += [*message, *answer]
    finally:
        engine.shutdown()


def test_positions_far_beyond_any_table_keep_their_angles(decoder: tiny.Model, oracle: Oracle) -> None:
    """A session that has talked for ten million tokens attends as one that has talked for twenty."""
    config = tiny.engine_config()
    backend = tiny.make_backend(decoder, config)
    engine = Engine(backend, config).start()
    try:
        sequence = engine.open("someone", [])
        tokens = history(30)
        say(engine, sequence, tokens[:2], 1)  # computes the sinks

        def jump_ahead(sequence: TokenSequence) -> None:
            """By whole turns of the ring; the window then fills anew."""
            ring = CacheConfig(2, 8, 4).slots - 2
            far = 2 + 10_000_000 // ring * ring
            sequence.slab.written = sequence.slab.committed = far - 1
            sequence.tokens.extend([5] * (far - 3))
            sequence.committed = far

        engine.read(sequence, jump_ahead)
        answer = say(engine, sequence, tokens, 4)
    finally:
        engine.shutdown()
    near = oracle.greedy([*tokens[:2], *([5] * 12), *tokens], 4, 2, 8)
    assert answer == near

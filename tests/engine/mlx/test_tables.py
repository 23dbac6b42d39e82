"""How a step's rows are grouped, padded and stored."""

import numpy as np
import pytest

from kakeya.config import CacheConfig
from kakeya.engine.batch import Segment
from kakeya.engine.mlx.tables import groups_of
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.slab import SlabGeometry, SlabPool
from kakeya.types import DType

SINK, WINDOW, SPARE = 2, 8, 4


@pytest.fixture
def pool() -> SlabPool:
    return SlabPool(SlabGeometry(1, 1, 2, CacheConfig(SINK, WINDOW, SPARE), DType.FLOAT32), 8)


def segment(pool: SlabPool, start: int, rows: int) -> Segment:
    sequence = TokenSequence(pool.allocate(), "someone", (), None)
    return Segment(sequence, start, list(range(rows)), 0, 1)


def test_segments_of_one_length_are_one_group(pool: SlabPool) -> None:
    segments = [segment(pool, 20, 1), segment(pool, 0, 7), segment(pool, 5, 1), segment(pool, 0, 8)]
    single, prompts = groups_of(segments, ())
    assert (single.places, single.shape.sessions, single.shape.session_rows) == ([0, 2], 2, 1)
    assert (prompts.places, prompts.shape.sessions, prompts.shape.session_rows) == ([1, 3], 2, 8)
    assert single.shape.sink_columns == SINK, "one of them is past the capacity"
    assert prompts.shape.sink_columns == 0
    assert prompts.logit_rows == [6, 15]
    assert prompts.positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 6], "padding repeats the last row"


def test_a_block_that_would_overwrite_what_it_sees_comes_in_pieces(pool: SlabPool) -> None:
    (within,) = groups_of([segment(pool, 0, SINK + WINDOW + SPARE)], ())
    (beyond,) = groups_of([segment(pool, 1, SINK + WINDOW + SPARE)], ())
    assert (within.shape.pieces, within.shape.piece_rows) == (1, 16)
    assert (beyond.shape.pieces, beyond.shape.piece_rows) == (3, SPARE + 1)


def test_of_rows_that_share_a_slot_the_last_is_stored(pool: SlabPool) -> None:
    (group,) = groups_of([segment(pool, 0, 40)], ())
    rows, slabs, slots = group.stored_rows()
    assert sorted(slots.tolist()) == list(range(SINK + WINDOW + SPARE))
    assert rows.tolist() == [0, 1, *range(40 - WINDOW - SPARE, 40)]
    assert np.unique(slabs).tolist() == [group.segments[0].sequence.slab.index]

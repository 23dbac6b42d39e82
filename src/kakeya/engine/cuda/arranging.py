"""The order of a step's rows on the device, and the tables that describe it.

Single tokens come first, the rows of longer segments behind them. In exact numerics every row attends like a
single token: rows go in waves. The rows of a wave are stored before they attend, so a wave must not overwrite
what its first row sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from kakeya.config import CacheConfig
from kakeya.engine.batch import Segment
from kakeya.engine.cuda.shapes import StepBuckets, StepShape
from kakeya.engine.cuda.tables import HostTables, Int32Array
from kakeya.kernels.gpu import TILE_ROWS

_SAME_ORDER: Int32Array = np.empty(0, dtype=np.int32)


@dataclass(frozen=True)
class Wave:
    """Neighbouring rows that attend together, each like a single token."""

    first: int
    count: int
    has_neighbours: bool = False
    """Some of them belong to one session, so all must be stored before any attends."""


@dataclass(frozen=True)
class Arrangement:
    """A step as the device sees it. A captured one is padded to a bucket."""

    shape: StepShape
    waves: Sequence[Wave]
    order: Int32Array
    """The place of each row, in segment order. Empty if rows keep their order."""
    is_captured: bool


def captured_step(shape: StepShape, order: Int32Array = _SAME_ORDER) -> Arrangement:
    """The arrangement that a bucket stands for."""
    waves = (Wave(0, shape.decode_rows, has_neighbours=shape.drafts > 0),) if shape.decode_rows else ()
    return Arrangement(shape, waves, order, is_captured=True)


class Arranger:
    """Fills the tables of steps."""

    def __init__(self, buckets: StepBuckets, cache: CacheConfig, exact: bool) -> None:
        self._buckets = buckets
        self._cache = cache
        self._exact = exact

    def arrange(
        self, tables: HostTables, segments: Sequence[Segment], logits: int, *, captured: bool = True
    ) -> Arrangement:
        """Fill the tables for a step with `logits` rows of logits, the last ones of each segment.

        Only a `captured` step is padded to the shape of a graph.
        """
        if captured and logits == len(segments) and all(len(segment.tokens) == 1 for segment in segments):
            return self._single_tokens(tables, segments)
        if self._exact:
            return self._in_waves(tables, segments, logits)
        singles = sum(len(segment.tokens) == 1 for segment in segments)
        longer = len(segments) - singles
        rows = sum(len(segment.tokens) for segment in segments if len(segment.tokens) > 1)
        shape = self._buckets.captured_mixed(singles, rows, longer, logits) if captured and longer else None
        if shape is not None:
            return captured_step(shape, self._prefill_behind(tables, segments, shape))
        shape = self._buckets.uncaptured(singles, rows, longer, logits)
        order = self._prefill_behind(tables, segments, shape)
        return replace(captured_step(shape, order), is_captured=False)

    def _single_tokens(self, tables: HostTables, segments: Sequence[Segment]) -> Arrangement:
        shape, count = self._buckets.decode(len(segments)), len(segments)
        slabs = [segment.sequence.slab for segment in segments]
        tables.table("token_ids")[:count] = [segment.tokens[0] for segment in segments]
        tables.table("positions")[:count] = [segment.start for segment in segments]
        tables.table("sinks")[:count] = [slab.sink for slab in slabs]
        tables.table("slabs")[:count] = [slab.index for slab in slabs]
        tables.table("slabs")[count : shape.decode_rows] = -1
        return captured_step(shape)

    def drafting(self, tables: HostTables, segments: Sequence[Segment], count: int) -> StepShape:
        """Fill the tables of a step in which the device drafts `count` tokens behind each single one."""
        shape = self._buckets.drafting(len(segments), count)
        sessions, given = shape.sessions, len(segments)
        slabs = [segment.sequence.slab for segment in segments]
        starts = np.array([segment.start for segment in segments], dtype=np.int32)
        tables.table("token_ids")[:given] = [segment.tokens[0] for segment in segments]
        for place in range(1 + count):
            wave = slice(place * sessions, place * sessions + given)
            tables.table("positions")[wave] = starts + place
            tables.table("sinks")[wave] = [slab.sink for slab in slabs]
            tables.table("slabs")[wave] = [slab.index for slab in slabs]
            tables.table("slabs")[wave.stop : (place + 1) * sessions] = -1
        return shape

    def _prefill_behind(
        self, tables: HostTables, segments: Sequence[Segment], shape: StepShape
    ) -> Int32Array:
        rows, prefill = _Rows(segments), _Prefill(tables, shape)
        for index, segment in enumerate(segments):
            if len(segment.tokens) == 1:
                rows.put(index, 0, 1)
        rows.pad(shape.decode_rows)
        for index, segment in enumerate(segments):
            if len(segment.tokens) > 1:
                prefill.put(segment)
                rows.put(index, 0, len(segment.tokens))
        rows.pad(shape.rows)
        prefill.write()
        rows.write(tables, shape)
        return rows.order

    def _in_waves(self, tables: HostTables, segments: Sequence[Segment], logits: int) -> Arrangement:
        rows, waves, taken = _Rows(segments), list[Wave](), [0] * len(segments)
        while rows.count < rows.total:
            first, sessions = rows.count, 0
            for index, segment in enumerate(segments):
                count = min(len(segment.tokens) - taken[index], self._most_together(segment, taken[index]))
                if count:
                    rows.put(index, taken[index], count)
                    taken[index] += count
                    sessions += 1
            waves.append(Wave(first, rows.count - first, has_neighbours=rows.count - first > sessions))
        shape = StepShape(rows.count, logit_rows=logits)
        rows.write(tables, shape)
        return Arrangement(shape, waves, rows.order, is_captured=False)

    def _most_together(self, segment: Segment, taken: int) -> int:
        """How many rows can be stored before the first of them attends: as many as the spare slots protect,
        or all that go into slots that were never filled."""
        return max(self._cache.spare + 1, self._cache.slots - segment.start - taken)


@dataclass
class _Rows:
    """The columns of the row tables as they grow, and the place of each row of each segment."""

    segments: Sequence[Segment]
    token_ids: list[int] = field(default_factory=list)
    slabs: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sinks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.order = np.empty(self.total, dtype=np.int32)

    @cached_property
    def _ends(self) -> list[int]:
        """Where the rows of each segment end in segment order."""
        return list(accumulate(len(segment.tokens) for segment in self.segments))

    @property
    def count(self) -> int:
        return len(self.slabs)

    @property
    def total(self) -> int:
        return self._ends[-1]

    def put(self, index: int, offset: int, count: int) -> None:
        """Add `count` rows of a segment, from its `offset` on."""
        segment = self.segments[index]
        slab, start = segment.sequence.slab, segment.start + offset
        begin = self._ends[index] - len(segment.tokens) + offset
        self.order[begin : begin + count] = np.arange(self.count, self.count + count)
        self.token_ids += segment.tokens[offset : offset + count]
        self.positions += range(start, start + count)
        self.slabs += [slab.index] * count
        self.sinks += [slab.sink] * count

    def pad(self, count: int) -> None:
        """Add padding up to `count` rows in all."""
        more = count - self.count
        self.slabs += [-1] * more
        for column in (self.token_ids, self.positions, self.sinks):
            column += [0] * more

    def write(self, tables: HostTables, shape: StepShape) -> None:
        for name in ("token_ids", "slabs", "positions", "sinks"):
            tables.table(name)[: self.count] = getattr(self, name)
        wanted = [
            row
            for segment, end in zip(self.segments, self._ends, strict=True)
            for row in range(end - segment.logit_rows, end)
        ]
        logit_rows = self.order[wanted]
        count = len(wanted)
        tables.table("logit_rows")[:count] = logit_rows
        tables.table("logit_rows")[count : shape.logit_rows] = 0  # any row: nobody reads its result
        tables.table("logit_slabs")[:count] = tables.table("slabs")[logit_rows]
        tables.table("logit_slabs")[count : shape.logit_rows] = -1


class _Prefill:
    """The tables of segments and tiles as they grow. Rows count from the first behind the decode rows."""

    def __init__(self, tables: HostTables, shape: StepShape) -> None:
        self._tables, self._shape = tables, shape
        self._segments: list[int] = []
        self._tiles: list[int] = []
        self._row_segments: list[int] = []

    def put(self, segment: Segment) -> None:
        slab, count = segment.sequence.slab, len(segment.tokens)
        index = len(self._segments) // 5
        self._segments += (slab.index, segment.start, len(self._row_segments), count, slab.sink)
        for offset in range(0, count, TILE_ROWS):
            self._tiles += (index, offset)
        self._row_segments += [index] * count

    def write(self) -> None:
        self._fill("segments", self._segments, len(self._segments))
        self._fill("tiles", self._tiles, 2 * self._shape.tiles)
        self._fill("row_segments", self._row_segments, self._shape.prefill_rows)

    def _fill(self, name: str, numbers: list[int], padded: int) -> None:
        table = self._tables.table(name)
        table[: len(numbers)] = numbers
        table[len(numbers) : padded] = -1

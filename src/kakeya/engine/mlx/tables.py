"""The tables that describe a group of rows: tokens, slots, angles and what is visible, padded to its shape.

Padding repeats: the last row of a session, the last session of a group. It then writes what is there already.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from kakeya.config import CacheConfig
from kakeya.engine.batch import Segment
from kakeya.engine.bounded import query_growth, rotations, visibility
from kakeya.engine.mlx.arrays import to_mlx
from kakeya.engine.mlx.decoder import Inputs, MlxDecoder
from kakeya.engine.mlx.shapes import GroupShape, padded
from kakeya.models.config import ModelConfig
from kakeya.models.rope import RopeConfig

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """Segments that are computed together, and where they were in the step."""

    shape: GroupShape
    segments: Sequence[Segment]
    places: Sequence[int]

    @cached_property
    def positions(self) -> Int64Array:
        """[sessions, rows], padding included."""
        rows = [np.arange(segment.start, segment.end) for segment in self._padded_segments]
        return np.stack([_repeated(each, self.shape.session_rows) for each in rows])

    @cached_property
    def slots(self) -> Int64Array:
        geometry = self.segments[0].sequence.slab.geometry
        pairs = zip(self.positions, self._padded_segments, strict=True)
        return np.stack([geometry.slots_of(each, segment.sequence.slab.sink) for each, segment in pairs])

    @property
    def logit_rows(self) -> list[int]:
        """The asked-for rows among all of them."""
        asked: list[int] = []
        for place, segment in enumerate(self.segments):
            end = place * self.shape.session_rows + segment.rows
            asked += range(end - segment.logit_rows, end)
        return asked

    def rows_of(self, place: int) -> slice:
        """A segment's rows among all of them."""
        first = place * self.shape.session_rows
        return slice(first, first + self.segments[place].rows)

    def stored_rows(self) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The rows that slabs are to hold, and the slab and the slot of each: of rows that share a slot, the
        last."""
        rows, slabs = [], []
        for place, segment in enumerate(self.segments):
            slab, first = segment.sequence.slab, place * self.shape.session_rows
            positions = np.arange(segment.start, segment.end)
            lasting = segment.end - (self._cache.slots - slab.sink)
            rows.append(first + np.flatnonzero((positions < slab.sink) | (positions >= lasting)))
            slabs.append(np.full(len(rows[-1]), slab.index))
        chosen = np.concatenate(rows)
        return chosen, np.concatenate(slabs), self.slots.reshape(-1)[chosen]

    @property
    def _padded_segments(self) -> Sequence[Segment]:
        return [*self.segments, *[self.segments[-1]] * (self.shape.sessions - len(self.segments))]

    def inputs(self, model: ModelConfig, decoder: MlxDecoder, pool: mx.array) -> Inputs:
        slabs = [segment.sequence.slab for segment in self._padded_segments]
        inputs: Inputs = {
            "pool": pool,
            "token_ids": self._token_ids(),
            "slabs": mx.array([slab.index for slab in slabs]),
            "slots": mx.array(self.slots.astype(np.int32)),
            "sinks": mx.array([slab.sink for slab in slabs]),
            "visible": [mx.array(self._visible(local)) for local in decoder.windows],
            "rotations": [self._rotations(rope) for rope in decoder.ropes],
        }
        growth = query_growth(model, self._cache.capacity, self.positions)
        if growth is not None:
            inputs["growth"] = mx.array(growth)
        if self.shape.logit_rows:
            inputs["logit_rows"] = mx.array(_repeated(np.array(self.logit_rows), self.shape.logit_rows))
        return inputs

    @property
    def _cache(self) -> CacheConfig:
        return self.segments[0].sequence.slab.geometry.cache

    def _token_ids(self) -> mx.array:
        rows = [_repeated(np.array(each.tokens), self.shape.session_rows) for each in self._padded_segments]
        return mx.array(np.stack(rows).astype(np.int32))

    def _rotations(self, rope: RopeConfig) -> list[mx.array]:
        flat = rotations(rope, self._cache.capacity, self.positions.reshape(-1))
        wanted = flat if self.shape.sink_columns else flat[:2]
        return [to_mlx(table).reshape(*self.positions.shape, -1) for table in wanted]

    def _visible(self, local: int | None) -> npt.NDArray[np.bool_]:
        """[sessions, rows, slots]: each piece sees what is there once it is written."""
        rows, slots = self.shape.piece_rows, self._cache.slots
        pieces = self.positions.reshape(self.shape.sessions, self.shape.pieces, rows)
        masks = [
            visibility(segment.sequence.slab, piece, slots, local)
            for segment, of_session in zip(self._padded_segments, pieces, strict=True)
            for piece in of_session
        ]
        return np.stack(masks).reshape(self.shape.sessions, self.shape.session_rows, slots)


def groups_of(segments: Sequence[Segment], hidden_layers: Sequence[int]) -> Iterator[Group]:
    """The segments of a step, those of equal padded lengths together."""
    places = sorted(range(len(segments)), key=lambda place: _pieces(segments[place]))
    for pieces, alike in groupby(places, key=lambda place: _pieces(segments[place])):
        chosen = list(alike)
        yield _group(pieces, [segments[place] for place in chosen], chosen, hidden_layers)


def _group(
    pieces: tuple[int, int], segments: Sequence[Segment], places: Sequence[int], hidden: Sequence[int]
) -> Group:
    slabs = [segment.sequence.slab for segment in segments]
    cache = slabs[0].geometry.cache
    wrapped = any(segment.end > cache.capacity for segment in segments)
    sinks = min(padded(max(slab.sink for slab in slabs)), cache.slots) if wrapped else 0
    asked = sum(segment.logit_rows for segment in segments)
    shape = GroupShape(padded(len(segments)), *pieces, sinks, padded(asked), tuple(hidden))
    return Group(shape, segments, places)


def _pieces(segment: Segment) -> tuple[int, int]:
    """How many pieces of how many rows: one, unless it would overwrite what its first rows still see."""
    cache = segment.sequence.slab.geometry.cache
    together = cache.spare + 1
    if segment.rows <= together or segment.end <= cache.slots:
        return 1, padded(segment.rows)
    return padded(-(-segment.rows // together)), together


def _repeated(values: npt.NDArray[np.generic], length: int) -> npt.NDArray[np.generic]:
    """With the last one repeated up to `length`."""
    return np.pad(values, (0, length - len(values)), mode="edge")

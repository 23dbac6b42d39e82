"""What a token sees of its slab, at which angles and how warm: numbers that every backend starts from."""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from kakeya.engine.slab import KVSlab
from kakeya.models.config import ModelConfig
from kakeya.models.rope import RopeConfig, rope_tables

Positions = npt.NDArray[np.int64]


def visibility(
    slab: KVSlab, positions: Positions, columns: int, local_window: int | None
) -> npt.NDArray[np.bool_]:
    """Which of the first `columns` slots each position sees once all of `positions` are written.

    A layer with its own local window L sees less: distances below L, where a sink's distance is the
    cache-relative one.
    """
    cache, sink, newest = slab.geometry.cache, slab.sink, int(positions[-1])
    slots = np.arange(columns)
    held = np.where(slots < sink, slots, newest - (newest - slots) % (cache.slots - sink))
    distance = positions[:, None] - held[None, :]
    is_sink = np.broadcast_to(slots < sink, distance.shape)
    in_window = (held >= sink) & (distance < slab.window)
    visible = (distance >= 0) & (is_sink | in_window)
    if local_window is not None:
        seen_at = np.minimum(positions, cache.capacity - 1)[:, None]
        relative = np.where(is_sink, seen_at - held[None, :], distance)
        visible &= relative < local_window
    result: npt.NDArray[np.bool_] = visible
    return result


def rotations(rope: RopeConfig, capacity: int, positions: Positions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """cos, sin at each position and cos, sin for sink columns, each [rows, d / 2] float32.

    The same tensors twice while no position is past the capacity.
    """
    bounded = rope.within(capacity)
    window = rope_tables(bounded, positions)
    sink_positions = np.minimum(positions, capacity - 1)
    before_wrap = np.array_equal(positions, sink_positions)
    sink = window if before_wrap else rope_tables(bounded, sink_positions)
    return (*window, *sink)


def query_growth(model: ModelConfig, capacity: int, positions: Positions) -> npt.NDArray[np.float32] | None:
    """What the queries at each position are multiplied by, None where it is 1 for all that a cache can have.

    Like every angle, the temperature stops growing when the cache is full.
    """
    temperature = model.query_temperature
    if temperature is None or capacity <= temperature.positions:
        return None
    laps = np.log1p(np.minimum(positions, capacity - 1) // temperature.positions)
    growth: npt.NDArray[np.float32] = (1 + temperature.beta * laps).astype(np.float32)
    return growth

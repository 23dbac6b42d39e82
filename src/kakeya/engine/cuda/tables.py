"""The tables that describe a step to the device: filled in pinned memory, sent in one copy.

The device's tables are static, because graphs keep their addresses. The host has a few buffers of the same
layout and takes them in turns, so that one can be filled while another is still being copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kakeya.engine.batch import PENDING
from kakeya.engine.cuda.shapes import StepLimits, StepShape
from kakeya.engine.device import DeviceEvent, host_buffer
from kakeya.engine.sampler import SampleRequest
from kakeya.kernels.gpu import SEGMENT_FIELDS, DraftTable, PrefillTable, RowTable, SamplingTable
from kakeya.types import SamplingParams

Int32Array = npt.NDArray[np.int32]

# At most two steps are in flight while a third is being filled.
BUFFERS = 3
_TILE_FIELDS = 2
_TINY = float(np.finfo(np.float32).tiny)
_SINGLE_COLUMNS = ("token_ids", "slabs", "positions", "sinks", "sampling_positions")


@dataclass(frozen=True)
class Layout:
    """Where each table begins in a buffer of int32: first those that every step sends, then those of steps
    with prompts or gathered logits, then the sampling settings."""

    limits: StepLimits

    @property
    def sizes(self) -> dict[str, int]:
        """The int32 values of each table, in order."""
        rows = self.limits.rows
        return {
            "token_ids": rows,
            "slabs": rows,
            "positions": rows,
            "sinks": rows,
            "sampling_positions": rows,
            "logit_rows": rows,
            "logit_slabs": rows,
            "row_segments": rows,
            "segments": self.limits.segments * SEGMENT_FIELDS,
            "tiles": self.limits.tiles * _TILE_FIELDS,
            "seed": 2 * rows,
            "temperature": rows,
            "top_k": rows,
            "top_p": rows,
            "min_p": rows,
        }

    def places(self) -> dict[str, slice]:
        # All begin at even places, because seeds have 64 bits.
        edges = accumulate((size + size % 2 for size in self.sizes.values()), initial=0)
        return {name: slice(*edge) for name, edge in zip(self.sizes, pairwise(edges), strict=True)}


class StepTables:
    """The tables on the device, and the host buffers that fill them. Used by one thread."""

    def __init__(self, limits: StepLimits, device: torch.device) -> None:
        self._places = Layout(limits).places()
        size = max(place.stop for place in self._places.values())
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._buffers = cycle([HostTables(size, self._places, device) for _ in range(BUFFERS)])
        # The sampling settings that are on the device; () means temperature 0 everywhere: greedy.
        self._sampling: Sequence[SamplingParams] | None = None
        # All rows are padding until a step says otherwise.
        for name in ("slabs", "logit_slabs", "row_segments", "tiles"):
            self._view(name).fill_(-1)
        self.token_ids = self._view("token_ids")
        self.logit_rows = self._view("logit_rows")

    def begin(self) -> "HostTables":
        """A buffer to fill. Waits, if needed, until its last copy is done."""
        buffer = next(self._buffers)
        buffer.sent.wait()
        return buffer

    def send(self, buffer: "HostTables", requests: Sequence[SampleRequest], shape: StepShape) -> None:
        """Copy to the device what a step of this shape reads. `requests` belong to its rows of logits."""
        is_greedy = not any(request.params.temperature for request in requests)
        if not is_greedy:
            buffer.table("sampling_positions")[: len(requests)] = [request.position for request in requests]
        self._copy(buffer, "token_ids", "tiles" if shape.is_mixed else "sampling_positions")
        if not is_greedy:
            self._send_sampling(buffer, requests)
        elif requests and self._sampling != ():
            buffer.floats("temperature")[:] = 0.0
            self._copy(buffer, "temperature", "temperature")
            self._sampling = ()
        buffer.sent.record()

    def send_next(self, before: "SingleRows") -> "SingleRows":
        """Send the tables of the step after `before`: each session's token is the one that its last step
        sampled, at the next position, with the same sampling settings."""
        after, buffer = before.advanced(), self.begin()
        for name, column in after.columns.items():
            buffer.table(name)[: len(column)] = column
        self._copy(buffer, "token_ids", "sampling_positions")
        buffer.sent.record()
        return after

    def rows(self, first: int, count: int) -> RowTable:
        part = slice(first, first + count)
        return RowTable(self._view("slabs")[part], self._view("positions")[part], self._view("sinks")[part])

    def prefill(self, shape: StepShape) -> PrefillTable:
        """The table of the rows behind the decode rows."""
        segments = self._view("segments")[: shape.segments * SEGMENT_FIELDS]
        tiles = self._view("tiles")[: shape.tiles * _TILE_FIELDS]
        return PrefillTable(
            segments.view(-1, SEGMENT_FIELDS),
            tiles.view(-1, _TILE_FIELDS),
            self._view("row_segments")[: shape.prefill_rows],
        )

    def logits(self, shape: StepShape, first: int, count: int) -> tuple[RowTable, SamplingTable]:
        """The tables of `count` rows that go through the head, from `first` on."""
        part = slice(first, first + count)
        slabs = self._view("logit_slabs" if shape.logit_rows else "slabs")[part]
        positions = self._view("sampling_positions")[part]
        sampling = SamplingTable(
            temperature=self._view("temperature").view(torch.float32)[part],
            top_k=self._view("top_k")[part],
            top_p=self._view("top_p").view(torch.float32)[part],
            min_p=self._view("min_p").view(torch.float32)[part],
            seed=self._view("seed").view(torch.int64)[part],
            positions=positions,
        )
        return RowTable(slabs, positions, positions), sampling

    def last_rows(self, shape: StepShape) -> tuple[Tensor | None, Tensor]:
        """The rows whose logits are wanted, None if they are all; and the slab of each."""
        if shape.logit_rows:
            return self.logit_rows[: shape.logit_rows], self._view("logit_slabs")[: shape.logit_rows]
        return None, self._view("slabs")[: shape.decode_rows]

    def drafts(self, shape: StepShape) -> DraftTable:
        """The table of a drafting step."""
        names = ("token_ids", "slabs", "positions", "sampling_positions")
        return DraftTable(*(self._view(name)[: shape.decode_rows] for name in names))

    def _send_sampling(self, buffer: "HostTables", requests: Sequence[SampleRequest]) -> None:
        """Send the settings if they changed. They seldom do; positions always do, and were sent before."""
        params = [request.params for request in requests]
        if params != self._sampling:
            buffer.fill_sampling(params)
            self._copy(buffer, "seed", "min_p")
            self._sampling = params

    def _view(self, name: str) -> Tensor:
        return self._device[self._places[name]]

    def _copy(self, buffer: "HostTables", first: str, last: str) -> None:
        part = slice(self._places[first].start, self._places[last].stop)
        self._device[part].copy_(buffer.memory[part], non_blocking=True)


class HostTables:
    """One host buffer. Its tables are numpy views, and `sent` is the event after which it may be filled
    again."""

    def __init__(self, size: int, places: dict[str, slice], device: torch.device) -> None:
        self.memory = host_buffer(size, dtype=torch.int32, device=device)
        self.sent = DeviceEvent(device).record()
        self._places = places
        self._numbers: Int32Array = self.memory.numpy()

    def table(self, name: str) -> Int32Array:
        return self._numbers[self._places[name]]

    def floats(self, name: str) -> npt.NDArray[np.float32]:
        return self.table(name).view(np.float32)

    def single_rows(self, shape: StepShape, count: int) -> "SingleRows":
        """A copy of the tables of a step of `count` single tokens, padding included."""
        columns = {name: self.table(name)[: shape.decode_rows].copy() for name in _SINGLE_COLUMNS}
        return SingleRows(shape, count, columns)

    def fill_sampling(self, params: Sequence[SamplingParams]) -> None:
        """Fill in the sampling settings of each row of logits. Rows of padding are greedy, which is the least
        work."""
        count = len(params)
        # What float32 cannot hold becomes greedy: temperature 0, or the least top-p.
        temperatures = [each.temperature if each.temperature >= _TINY else 0.0 for each in params]
        self.floats("temperature")[:count] = temperatures
        self.floats("temperature")[count:] = 0.0
        self.table("top_k")[:count] = [each.top_k for each in params]
        self.floats("top_p")[:count] = [max(each.top_p, _TINY) for each in params]
        self.floats("min_p")[:count] = [each.min_p for each in params]
        seeds = np.array([each.seed for each in params], dtype=np.uint64)
        self.table("seed").view(np.int64)[:count] = seeds.view(np.int64)


@dataclass(frozen=True)
class SingleRows:
    """The tables of a step of `count` single tokens."""

    shape: StepShape
    count: int
    columns: dict[str, Int32Array]

    def advanced(self) -> "SingleRows":
        """The tables of the next step: every token is the one just sampled, every position the next."""
        columns = dict(self.columns)
        columns["token_ids"] = np.full_like(columns["token_ids"], PENDING)
        for name in ("positions", "sampling_positions"):
            columns[name] = columns[name] + 1
        return replace(self, columns=columns)

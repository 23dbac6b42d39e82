"""The operations of `GpuKernels` at a shape's sizes, each with data to call it on and the bytes that it must
move.

Bytes to read and to write count once, past the wrap. The weights of norms and the tables that describe rows
are not counted: they are a few bytes per row.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kakeya.bench.gpu.plan import GpuPlan
from kakeya.bench.gpu.results import GREEDY, SEEDED
from kakeya.bench.gpu.shapes import ELEMENT_BYTES, Shape
from kakeya.engine.cuda.decoder import attention_shape
from kakeya.kernels.gpu import (
    MAX_K_SPLITS,
    TILE_ROWS,
    AttentionLayer,
    GpuKernels,
    PrefillTable,
    RowTable,
    SamplingScratch,
    SamplingTable,
    kv_splits,
)
from kakeya.kernels.gpu.launches import own_k_splits

# call(number) runs the kernel on the data of that number.
Call = Callable[[int], object]

_ELEMENT = torch.bfloat16
_DRAFTED = 8  # rows of a session in a drafting step
_FLOAT = 4  # bytes of what is not an element: hidden states, rotations, logits
_LOGIT_DEVIATION = 2.2  # about a model's own: how many tokens top-p keeps depends on it


@dataclass(frozen=True)
class Operation:
    """`make` prepares so many calls, each on its own data."""

    name: str
    size: str
    moved_bytes: int
    make: Callable[[GpuKernels, int], Call]
    flops: int | None = None
    """Of an operation that is compared with the matmul rate instead of the copy rate."""


@dataclass(frozen=True)
class Matrix:
    """A weight of the model, and what a matmul with it fuses."""

    name: str
    weight_rows: int
    inputs: int
    norm: bool = False
    gate: bool = False
    residual: bool = False

    @property
    def outputs(self) -> int:
        return self.weight_rows // 2 if self.gate else self.weight_rows


class Operations:
    """All operations for one shape. Nothing is allocated before an operation is made."""

    def __init__(self, shape: Shape, plan: GpuPlan, device: torch.device) -> None:
        self._model, self._plan, self._device, self._rows = shape.model, plan, device, plan.sessions
        self._qkv_size = shape.model.query_size + 2 * shape.model.kv_size
        self._attention = attention_shape(shape.model, plan.cache)

    def all(self, attended_rows: Sequence[int]) -> Iterator[Operation]:
        """In the order of the interface; attention with each of these numbers of sessions."""
        yield from self._rowwise()
        yield from self._matmuls()
        yield from self._attentions(attended_rows)
        size, moved = _counted(self._rows), self._rows * self._model.vocab_size * _FLOAT
        for name, temperature, top_p in ((GREEDY, 0.0, 1.0), (SEEDED, 0.8, 0.95)):
            yield Operation("sample", f"{size}, {name}", moved, partial(self._sample, temperature, top_p))

    def _rowwise(self) -> Iterator[Operation]:
        model, rows = self._model, self._rows
        hidden, size = model.hidden_size, _counted(rows)
        yield Operation("embed", size, rows * hidden * (ELEMENT_BYTES + _FLOAT), self._embed)
        yield Operation("rotations", size, rows * 2 * model.head_dim * _FLOAT, self._rotations)
        # The hidden state is read and written, an addend read, the normed state written.
        yield Operation("add_norm", size, rows * hidden * 2 * (_FLOAT + ELEMENT_BYTES), self._add_norm)
        yield Operation("norm_rows", size, rows * 2 * model.query_size * ELEMENT_BYTES, self._norm_rows)
        yield Operation("gated", size, rows * 3 * model.intermediate_size * ELEMENT_BYTES, self._gated)

    def _matmuls(self) -> Iterator[Operation]:
        """The GEMV of each matrix, and the matmuls of many rows that are not left to cuBLAS."""
        model, rows = self._model, self._rows
        hidden, inner = model.hidden_size, model.intermediate_size
        matrices = [
            Matrix("qkv", self._qkv_size, hidden, norm=True),
            Matrix("output", hidden, model.query_size, residual=True),
            Matrix("gate and up", 2 * inner, hidden, norm=True, gate=True),
            Matrix("down", hidden, inner, residual=True),
        ]
        for each in (*matrices, Matrix("head", model.vocab_size, hidden)):
            size = f"{each.name}, {each.weight_rows:,} × {each.inputs:,}"
            # The vectors are a hundredth of the matrix or less.
            moved = each.weight_rows * each.inputs * ELEMENT_BYTES
            yield Operation("gemv", size, moved, partial(self._gemv, each))
        for each in matrices:
            most = MAX_K_SPLITS if each.residual else 1
            if splits := own_k_splits(rows, each.outputs, each.inputs, most):
                size = f"{each.name}, {_counted(rows)}, {each.weight_rows:,} × {each.inputs:,}"
                moved = (each.weight_rows * each.inputs + rows * (each.inputs + each.outputs)) * ELEMENT_BYTES
                yield Operation("matmul", size, moved, partial(self._matmul, each, splits))

    def _attentions(self, attended_rows: Sequence[int]) -> Iterator[Operation]:
        model, capacity = self._model, self._plan.past_the_wrap
        token = 2 * model.kv_size * ELEMENT_BYTES  # key and value in one layer
        query = 2 * model.query_size * ELEMENT_BYTES  # and the output
        rotation = 2 * model.head_dim * _FLOAT  # for the window and for the sinks
        for rows in attended_rows:
            splits = kv_splits(rows, model.num_kv_heads)
            size = f"{_counted(rows)}, {splits} split{'' if splits == 1 else 's'}"
            # A row reads what its session remembers, and stores the new token, which came from the matmul.
            moved = rows * ((capacity + 1) * token + query + rotation)
            yield Operation("decode_attention", size, moved, partial(self._decode_attention, rows, splits))
        sessions = self._rows // 4
        # The rows of a session read together what it remembers, and store themselves.
        moved = sessions * ((capacity - 1 + _DRAFTED) * token + _DRAFTED * (token + query + rotation))
        size = f"{sessions} sessions, {_DRAFTED} rows each"
        yield Operation("draft_attention", size, moved, partial(self._draft_attention, sessions))
        # Sinks have no part in storing, so half of the rotations are read.
        moved = self._rows * (2 * token + rotation // 2)
        yield Operation("store_rows", _counted(self._rows), moved, self._store_rows)
        rows = self._plan.prompt_rows
        # It reads the block and the slab, and stores the block's last tokens. Every row sees as many tokens
        # as a session remembers: scores and weighted sums are its operations.
        moved = (capacity + min(rows, capacity)) * token + rows * (token + query + rotation)
        flops = 4 * rows * capacity * model.query_size
        make = partial(self._prefill_attention, rows)
        yield Operation("prefill_attention", _counted(rows), moved, make, flops)

    # How each is made.

    def _embed(self, kernels: GpuKernels, calls: int) -> Call:
        model, rows = self._model, self._rows
        table, newest = self._sessions(rows), self._ints(rows)
        weight = self._elements(model.vocab_size, model.hidden_size)
        tokens = torch.randint(model.vocab_size, (calls, rows), dtype=torch.int32, device=self._device)
        out = self._floats(calls, rows, model.hidden_size)
        return lambda at: kernels.embed(weight, tokens[at], newest, table, model.embed_scale, out[at])

    def _rotations(self, kernels: GpuKernels, calls: int) -> Call:
        half = self._model.head_dim // 2
        table, out = self._sessions(self._rows), self._floats(calls, 4, self._rows, half)
        frequencies = torch.logspace(0, -5, half, dtype=torch.float64, device=self._device)
        return lambda at: kernels.rotations(table, self._attention.capacity, frequencies, 1.0, out[at])

    def _add_norm(self, kernels: GpuKernels, calls: int) -> Call:
        size, eps = (calls, self._rows, self._model.hidden_size), self._model.norm_eps
        hidden, weight = self._floats(*size), self._floats(size[-1])
        addend, out = self._elements(*size), self._elements(*size)
        return lambda at: kernels.add_norm(hidden[at], addend[at], None, weight, eps, out[at])

    def _norm_rows(self, kernels: GpuKernels, calls: int) -> Call:
        width, eps = self._model.query_size, self._model.norm_eps
        queries, weight = self._elements(calls, self._rows, width), self._floats(width)
        return lambda at: kernels.norm_rows(queries[at], weight, eps)

    def _gated(self, kernels: GpuKernels, calls: int) -> Call:
        inner, activation = self._model.intermediate_size, self._model.activation
        gate_up, out = (self._elements(calls, self._rows, width) for width in (2 * inner, inner))
        return lambda at: kernels.gated(gate_up[at], activation, out[at])

    def _gemv(self, matrix: Matrix, kernels: GpuKernels, calls: int) -> Call:
        weight = self._elements(calls, matrix.weight_rows, matrix.inputs)
        x = self._floats(1, matrix.inputs) if matrix.norm else self._elements(1, matrix.inputs)
        out = self._elements(1, matrix.outputs) if matrix.norm else self._floats(1, matrix.outputs)
        fused: dict[str, Any] = {"residual": out} if matrix.residual else {}
        if matrix.norm:
            fused |= {"norm": self._floats(matrix.inputs), "eps": self._model.norm_eps}
        if matrix.gate:
            fused["gate"] = self._model.activation
        return lambda at: kernels.gemv(x, weight[at], out, **fused)

    def _matmul(self, matrix: Matrix, splits: int, kernels: GpuKernels, calls: int) -> Call:
        weight = self._elements(calls, matrix.weight_rows, matrix.inputs)
        x, size = self._elements(calls, self._rows, matrix.inputs), (self._rows, matrix.outputs)
        out = self._floats(splits, *size) if matrix.residual else self._elements(*size)
        gate = self._model.activation if matrix.gate else None
        return lambda at: kernels.matmul(x[at], weight[at], out, gate=gate)

    def _decode_attention(self, rows: int, splits: int, kernels: GpuKernels, calls: int) -> Call:
        layers, table, angles = self._layers(calls, rows), self._sessions(rows), self._angles(rows)
        qkv, out = (self._elements(calls, rows, width) for width in (self._qkv_size, self._model.query_size))
        scratch = kernels.scratch(
            self._attention, _ELEMENT, self._device, prefill_rows=0, partials=rows * splits
        )
        return lambda at: kernels.decode_attention(
            qkv[at], layers[at], angles, table, splits, scratch, out[at]
        )

    def _draft_attention(self, sessions: int, kernels: GpuKernels, calls: int) -> Call:
        rows, splits = sessions * _DRAFTED, kv_splits(sessions, self._model.num_kv_heads)
        each = self._sessions(sessions)
        places = torch.arange(_DRAFTED, dtype=torch.int32, device=self._device).repeat_interleave(sessions)
        table = RowTable(
            each.slabs.repeat(_DRAFTED), each.positions.repeat(_DRAFTED) + places, each.sinks.repeat(_DRAFTED)
        )
        layers, angles = self._layers(calls, sessions), self._angles(rows)
        qkv, out = (self._elements(calls, rows, width) for width in (self._qkv_size, self._model.query_size))
        scratch = kernels.scratch(
            self._attention, _ELEMENT, self._device, prefill_rows=0, partials=rows * splits
        )
        return lambda at: kernels.draft_attention(
            qkv[at], layers[at], angles, table, sessions, splits, scratch, out[at]
        )

    def _store_rows(self, kernels: GpuKernels, calls: int) -> Call:
        # As many rows of a session as overwrite nothing that the first of them sees.
        together = self._plan.cache.spare + 1
        number = torch.arange(self._rows, dtype=torch.int32, device=self._device)
        sinks = self._ints(self._rows, self._plan.cache.sink)
        table = RowTable(number // together, self._plan.position + number % together, sinks)
        layers, angles = self._layers(calls, -(-self._rows // together)), self._angles(self._rows)
        qkv = self._elements(calls, self._rows, self._qkv_size)
        return lambda at: kernels.store_rows(qkv[at], layers[at], angles, table)

    def _prefill_attention(self, rows: int, kernels: GpuKernels, calls: int) -> Call:
        first = torch.arange(0, rows, TILE_ROWS, dtype=torch.int32, device=self._device)
        segment = [0, self._plan.position, 0, rows, self._plan.cache.sink]
        table = PrefillTable(
            segments=torch.tensor([segment], dtype=torch.int32, device=self._device),
            tiles=torch.stack([torch.zeros_like(first), first], 1),
            row_segments=self._ints(rows),
        )
        layers, angles = self._layers(calls, 1), self._angles(rows)
        qkv, out = (self._elements(calls, rows, width) for width in (self._qkv_size, self._model.query_size))
        scratch = kernels.scratch(self._attention, _ELEMENT, self._device, prefill_rows=rows, partials=0)
        return lambda at: kernels.prefill_attention(qkv[at], layers[at], angles, table, scratch, out[at])

    def _sample(self, temperature: float, top_p: float, kernels: GpuKernels, calls: int) -> Call:
        rows, vocab, table = self._rows, self._model.vocab_size, self._sessions(self._rows)
        logits = self._floats(calls, rows, vocab).mul_(_LOGIT_DEVIATION)
        sampling = SamplingTable(
            temperature=torch.full((rows,), temperature, device=self._device),
            top_k=self._ints(rows),
            top_p=torch.full((rows,), top_p, device=self._device),
            min_p=torch.zeros(rows, device=self._device),
            seed=torch.arange(rows, device=self._device),
            positions=table.positions,
        )
        scratch = SamplingScratch.of(rows, vocab, self._device)
        newest, sampled = self._ints(rows), self._ints(rows)
        return lambda at: kernels.sample(logits[at], table, sampling, scratch, newest, sampled)

    # Data to call the kernels on.

    def _elements(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=_ELEMENT, device=self._device).normal_()

    def _floats(self, *size: int) -> Tensor:
        return torch.randn(size, device=self._device)

    def _ints(self, count: int, value: int = 0) -> Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=self._device)

    def _angles(self, rows: int) -> Tensor:
        return torch.rand(4, rows, self._model.head_dim // 2, device=self._device)

    def _sessions(self, rows: int) -> RowTable:
        """A row of each session, with slabs in random order."""
        slabs = torch.randperm(rows, device=self._device).int()
        return RowTable(slabs, self._ints(rows, self._plan.position), self._ints(rows, self._plan.cache.sink))

    def _layers(self, count: int, slabs: int) -> list[AttentionLayer]:
        """Of one pool."""
        shape = self._attention
        pool = self._elements(slabs, count, 2, shape.kv_heads, shape.slots, shape.head_dim)
        norm = torch.ones(shape.head_dim, device=self._device) if self._model.qk_norm else None
        return [AttentionLayer(pool, index, shape, norm, norm) for index in range(count)]


def _counted(rows: int) -> str:
    return f"{rows:,} row{'' if rows == 1 else 's'}"

"""The operations of `GpuKernels` at a shape's sizes, each with data to call it on and what it must move."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from kakeya.bench.gpu_plan import GpuPlan
from kakeya.bench.gpu_results import GREEDY, SEEDED
from kakeya.bench.gpu_shapes import Shape
from kakeya.bench.gpu_traffic import KernelTraffic
from kakeya.kernels.gpu import (
    MAX_PARTS,
    TILE_ROWS,
    Activation,
    AttentionLayer,
    AttentionShape,
    ChoiceScratch,
    ChoiceTable,
    GpuKernels,
    PromptTable,
    RowTable,
    splits_for,
)
from kakeya.kernels.gpu.launches import own_parts

# call(number): run the kernel on the data of that number.
Call = Callable[[int], object]
Make = Callable[[GpuKernels, int], Call]

_ELEMENT = torch.bfloat16
_LOGIT_DEVIATION = 2.2  # about a model's own: how many tokens top-p keeps depends on it


@dataclass(frozen=True)
class Operation:
    """`make` prepares so many calls, each with data of its own."""

    name: str
    size: str
    moved_bytes: int
    make: Make
    flops: int | None = None
    """Of one that is held to the rate of products instead of the copy's."""


class Operations:
    """All of them for one shape, past the wrap. Nothing is allocated before an operation is made."""

    def __init__(self, shape: Shape, plan: GpuPlan, device: torch.device) -> None:
        self._model, self._plan, self._device = shape.model, plan, device
        self._traffic = KernelTraffic(shape, plan.past_the_wrap)
        self._attention = AttentionShape(
            heads=shape.model.num_heads,
            kv_heads=shape.model.num_kv_heads,
            head_dim=shape.model.head_dim,
            capacity=plan.cache.capacity,
            slots=plan.cache.slots,
            scale=shape.model.query_scale,
            softcap=0.0,
            norm_eps=shape.model.norm_eps,
        )

    def all(self, attended_rows: Sequence[int]) -> Iterator[Operation]:
        """In the order of the interface; attention with each of these numbers of sessions."""
        yield from self._rowwise(self._plan.sessions)
        yield from self._products()
        yield from self._tiled_products(self._plan.sessions)
        yield from map(self._decode, attended_rows)
        yield from self._several_rows(self._plan.sessions, self._plan.prompt_rows)
        yield self._choice(self._plan.sessions, GREEDY, 0.0, 1.0)
        yield self._choice(self._plan.sessions, SEEDED, 0.8, 0.95)

    # What there is.

    def _rowwise(self, rows: int) -> Iterator[Operation]:
        size, traffic = _counted(rows), self._traffic
        yield Operation("embed", size, traffic.embed(rows), partial(self._embed, rows))
        yield Operation("rotations", size, traffic.rotations(rows), partial(self._rotate, rows))
        yield Operation("add_norm", size, traffic.add_norm(rows), partial(self._add_norm, rows))
        yield Operation("norm_rows", size, traffic.norm_rows(rows), partial(self._norm_rows, rows))
        yield Operation("gated", size, traffic.gated(rows), partial(self._gated, rows))

    def _products(self) -> Iterator[Operation]:
        """Those of a layer with what a step of one row fuses into them, and the head."""
        model = self._model
        hidden, inner = model.hidden_size, model.intermediate_size
        yield self._product("qkv", self._qkv_size, hidden, self._normed_product)
        yield self._product("output", hidden, model.query_size, self._added_product)
        yield self._product("gate and up", 2 * inner, hidden, self._gated_product)
        yield self._product("down", hidden, inner, self._added_product)
        yield self._product("head", model.vocab_size, hidden, self._logits_product)

    def _tiled_products(self, rows: int) -> Iterator[Operation]:
        """Those of a layer that a step of many rows does not leave to a library."""
        model = self._model
        hidden, inner = model.hidden_size, model.intermediate_size
        for name, outputs, inputs, gate, most_parts in (
            ("qkv", self._qkv_size, hidden, None, 1),
            ("output", hidden, model.query_size, None, MAX_PARTS),
            ("gate and up", inner, hidden, model.activation, 1),
            ("down", hidden, inner, None, MAX_PARTS),
        ):
            if parts := own_parts(rows, outputs, inputs, most_parts):
                sides = 1 if gate is None else 2
                shared = parts if most_parts > 1 else None
                yield Operation(
                    "product",
                    f"{name}, {_counted(rows)}, {sides * outputs:,} × {inputs:,}",
                    self._traffic.product(rows, outputs, inputs, sides),
                    partial(self._tiled_product, rows, outputs, inputs, gate, shared),
                )

    def _product(
        self, name: str, outputs: int, inputs: int, make: Callable[[int, int, GpuKernels, int], Call]
    ) -> Operation:
        moved = self._traffic.one_row_product(outputs, inputs)
        size = f"{name}, {outputs:,} × {inputs:,}"
        return Operation("one_row_product", size, moved, partial(make, outputs, inputs))

    def _decode(self, rows: int) -> Operation:
        splits = splits_for(rows, self._model.num_kv_heads)
        size = f"{_counted(rows)}, {splits} split{'' if splits == 1 else 's'}"
        moved = self._traffic.decode_attention(rows)
        return Operation("decode_attention", size, moved, partial(self._attend, rows, splits))

    def _several_rows(self, stored: int, block: int) -> Iterator[Operation]:
        """Of a session at once."""
        traffic = self._traffic
        yield Operation(
            "store_rows", _counted(stored), traffic.store_rows(stored), partial(self._store, stored)
        )
        yield Operation(
            "prompt_attention",
            _counted(block),
            traffic.prompt_attention(block),
            partial(self._attend_block, block),
            traffic.prompt_attention_flops(block),
        )

    def _choice(self, rows: int, sampling: str, temperature: float, top_p: float) -> Operation:
        make = partial(self._choose, rows, temperature, top_p)
        return Operation("choose", f"{_counted(rows)}, {sampling}", self._traffic.choose(rows), make)

    # How each is called.

    def _embed(self, rows: int, kernels: GpuKernels, calls: int) -> Call:
        model, table = self._model, self._sessions(rows)
        weight = self._elements(model.vocab_size, model.hidden_size)
        tokens = torch.randint(model.vocab_size, (calls, rows), dtype=torch.int32, device=self._device)
        newest, hidden = self._ints(rows), self._floats(calls, rows, model.hidden_size)
        return lambda at: kernels.embed(weight, tokens[at], newest, table, model.embed_scale, hidden[at])

    def _rotate(self, rows: int, kernels: GpuKernels, calls: int) -> Call:
        half, table = self._model.head_dim // 2, self._sessions(rows)
        frequencies = torch.logspace(0, -5, half, dtype=torch.float64, device=self._device)
        out = self._floats(calls, 4, rows, half)
        return lambda at: kernels.rotations(table, self._attention.capacity, frequencies, 1.0, out[at])

    def _add_norm(self, rows: int, kernels: GpuKernels, calls: int) -> Call:
        size, eps = (calls, rows, self._model.hidden_size), self._model.norm_eps
        hidden, addend, out = self._floats(*size), self._elements(*size), self._elements(*size)
        weight = self._floats(self._model.hidden_size)
        return lambda at: kernels.add_norm(hidden[at], addend[at], None, weight, eps, out[at])

    def _norm_rows(self, rows: int, kernels: GpuKernels, calls: int) -> Call:
        width, eps = self._model.query_size, self._model.norm_eps
        queries, weight = self._elements(calls, rows, width), self._floats(width)
        return lambda at: kernels.norm_rows(queries[at], weight, eps)

    def _gated(self, rows: int, kernels: GpuKernels, calls: int) -> Call:
        inner, activation = self._model.intermediate_size, self._model.activation
        gate_up, out = self._elements(calls, rows, 2 * inner), self._elements(calls, rows, inner)
        return lambda at: kernels.gated(gate_up[at], activation, out[at])

    def _normed_product(self, outputs: int, inputs: int, kernels: GpuKernels, calls: int) -> Call:
        weight, eps = self._elements(calls, outputs, inputs), self._model.norm_eps
        x, norm, out = self._floats(1, inputs), self._floats(inputs), self._elements(1, outputs)
        return lambda at: kernels.one_row_product(x, weight[at], out, norm=norm, eps=eps)

    def _added_product(self, outputs: int, inputs: int, kernels: GpuKernels, calls: int) -> Call:
        weight = self._elements(calls, outputs, inputs)
        x, hidden = self._elements(1, inputs), self._floats(1, outputs)
        return lambda at: kernels.one_row_product(x, weight[at], hidden, residual=hidden)

    def _gated_product(self, outputs: int, inputs: int, kernels: GpuKernels, calls: int) -> Call:
        weight, gate = self._elements(calls, outputs, inputs), self._model.activation
        x, norm, out = self._floats(1, inputs), self._floats(inputs), self._elements(1, outputs // 2)
        eps = self._model.norm_eps
        return lambda at: kernels.one_row_product(x, weight[at], out, norm=norm, eps=eps, gate=gate)

    def _logits_product(self, outputs: int, inputs: int, kernels: GpuKernels, calls: int) -> Call:
        weight = self._elements(calls, outputs, inputs)
        x, out = self._elements(1, inputs), self._floats(1, outputs)
        return lambda at: kernels.one_row_product(x, weight[at], out)

    def _tiled_product(
        self,
        rows: int,
        outputs: int,
        inputs: int,
        gate: Activation | None,
        parts: int | None,
        kernels: GpuKernels,
        calls: int,
    ) -> Call:
        weight = self._elements(calls, outputs if gate is None else 2 * outputs, inputs)
        x = self._elements(calls, rows, inputs)
        out = self._elements(rows, outputs) if parts is None else self._floats(parts, rows, outputs)
        return lambda at: kernels.product(x[at], weight[at], out, gate=gate)

    def _attend(self, rows: int, splits: int, kernels: GpuKernels, calls: int) -> Call:
        layers, table, rotations = self._layers(calls, rows), self._sessions(rows), self._rotations(rows)
        qkv, out = self._attended(calls, rows)
        scratch = kernels.scratch(self._attention, _ELEMENT, self._device, prompt_rows=0, parts=rows * splits)
        return lambda at: kernels.decode_attention(
            qkv[at], layers[at], rotations, table, splits, scratch, out[at]
        )

    def _store(self, rows: int, kernels: GpuKernels, calls: int) -> Call:
        # As many rows of a session as displace nothing that the first of them sees.
        together = self._plan.cache.spare + 1
        number = torch.arange(rows, dtype=torch.int32, device=self._device)
        positions = self._plan.position + number % together
        table = RowTable(number // together, positions, self._ints(rows, self._plan.cache.sink))
        layers, rotations = self._layers(calls, -(-rows // together)), self._rotations(rows)
        qkv = self._elements(calls, rows, self._qkv_size)
        return lambda at: kernels.store_rows(qkv[at], layers[at], rotations, table)

    def _attend_block(self, rows: int, kernels: GpuKernels, calls: int) -> Call:
        layers, prompt, rotations = self._layers(calls, 1), self._one_segment(rows), self._rotations(rows)
        qkv, out = self._attended(calls, rows)
        scratch = kernels.scratch(self._attention, _ELEMENT, self._device, prompt_rows=rows, parts=0)
        return lambda at: kernels.prompt_attention(qkv[at], layers[at], rotations, prompt, scratch, out[at])

    def _choose(self, rows: int, temperature: float, top_p: float, kernels: GpuKernels, calls: int) -> Call:
        vocab, table = self._model.vocab_size, self._sessions(rows)
        logits = self._floats(calls, rows, vocab).mul_(_LOGIT_DEVIATION)
        choice = ChoiceTable(
            temperature=torch.full((rows,), temperature, device=self._device),
            top_k=self._ints(rows),
            top_p=torch.full((rows,), top_p, device=self._device),
            min_p=torch.zeros(rows, device=self._device),
            seed=torch.arange(rows, device=self._device),
            positions=table.positions,
        )
        scratch = ChoiceScratch.of(rows, vocab, self._device)
        newest, chosen = self._ints(rows), self._ints(rows)
        return lambda at: kernels.choose(logits[at], table, choice, scratch, newest, chosen)

    # What they are called on.

    @property
    def _qkv_size(self) -> int:
        return self._model.query_size + 2 * self._model.kv_size

    def _elements(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=_ELEMENT, device=self._device).normal_()

    def _floats(self, *size: int) -> Tensor:
        return torch.randn(size, device=self._device)

    def _ints(self, count: int, value: int = 0) -> Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=self._device)

    def _sessions(self, rows: int) -> RowTable:
        """A row of each session, their slabs in no order."""
        slabs = torch.randperm(rows, device=self._device).int()
        return RowTable(slabs, self._ints(rows, self._plan.position), self._ints(rows, self._plan.cache.sink))

    def _one_segment(self, rows: int) -> PromptTable:
        first = torch.arange(0, rows, TILE_ROWS, dtype=torch.int32, device=self._device)
        segment = [0, self._plan.position, 0, rows, self._plan.cache.sink]
        return PromptTable(
            segments=torch.tensor([segment], dtype=torch.int32, device=self._device),
            tiles=torch.stack([torch.zeros_like(first), first], 1),
            row_segments=self._ints(rows),
        )

    def _layers(self, count: int, slabs: int) -> list[AttentionLayer]:
        """Of one pool."""
        shape = self._attention
        pool = self._elements(slabs, count, 2, shape.kv_heads, shape.slots, shape.head_dim)
        norm = torch.ones(shape.head_dim, device=self._device) if self._model.qk_norm else None
        return [AttentionLayer(pool, index, shape, norm, norm) for index in range(count)]

    def _attended(self, calls: int, rows: int) -> tuple[Tensor, Tensor]:
        """What attention reads, and room for what it makes of it."""
        return (
            self._elements(calls, rows, self._qkv_size),
            self._elements(calls, rows, self._model.query_size),
        )

    def _rotations(self, rows: int) -> Tensor:
        return torch.rand(4, rows, self._model.head_dim // 2, device=self._device)


def _counted(rows: int) -> str:
    return f"{rows:,} row{'' if rows == 1 else 's'}"

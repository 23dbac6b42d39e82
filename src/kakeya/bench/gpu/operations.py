"""The operations of `GpuKernels` at a shape's sizes, each with data to call it on and what it must move.

Bytes are those to read and write, each once, past the wrap. Norms' weights and the tables that describe the
rows are not counted: a few bytes a row.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kakeya.bench.gpu.plan import GpuPlan
from kakeya.bench.gpu.results import GREEDY, SEEDED
from kakeya.bench.gpu.shapes import ELEMENT_BYTES, Shape
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

_ELEMENT = torch.bfloat16
_FLOAT = 4  # bytes of what is not an element: hidden states, rotations, logits
_LOGIT_DEVIATION = 2.2  # about a model's own: how many tokens top-p keeps depends on it


@dataclass(frozen=True)
class Operation:
    """`make` prepares so many calls, each with data of its own."""

    name: str
    size: str
    moved_bytes: int
    make: Callable[[GpuKernels, int], Call]
    flops: int | None = None
    """Of one that is held to the rate of matmuls instead of the copy's."""


class Operations:
    """All of them for one shape. Nothing is allocated before an operation is made."""

    def __init__(self, shape: Shape, plan: GpuPlan, device: torch.device) -> None:
        self._model, self._plan, self._device = shape.model, plan, device
        self._qkv_size = shape.model.query_size + 2 * shape.model.kv_size
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
        rows = self._plan.sessions
        yield self.embed(rows)
        yield self.rotations(rows)
        yield self.add_norm(rows)
        yield self.norm_rows(rows)
        yield self.gated(rows)
        yield from self._one_row_products()
        yield from self._tiled_products(rows)
        yield from map(self.decode_attention, attended_rows)
        yield self.store_rows(rows)
        yield self.prompt_attention(self._plan.prompt_rows)
        yield self.choose(rows, GREEDY, 0.0, 1.0)
        yield self.choose(rows, SEEDED, 0.8, 0.95)

    def embed(self, rows: int) -> Operation:
        model = self._model

        def make(kernels: GpuKernels, calls: int) -> Call:
            table, newest = self._sessions(rows), self._ints(rows)
            weight = self._elements(model.vocab_size, model.hidden_size)
            tokens = torch.randint(model.vocab_size, (calls, rows), dtype=torch.int32, device=self._device)
            out = self._floats(calls, rows, model.hidden_size)
            return lambda at: kernels.embed(weight, tokens[at], newest, table, model.embed_scale, out[at])

        return Operation("embed", _counted(rows), rows * model.hidden_size * (ELEMENT_BYTES + _FLOAT), make)

    def rotations(self, rows: int) -> Operation:
        half = self._model.head_dim // 2

        def make(kernels: GpuKernels, calls: int) -> Call:
            table, out = self._sessions(rows), self._floats(calls, 4, rows, half)
            frequencies = torch.logspace(0, -5, half, dtype=torch.float64, device=self._device)
            return lambda at: kernels.rotations(table, self._attention.capacity, frequencies, 1.0, out[at])

        return Operation("rotations", _counted(rows), rows * self._rotation_bytes, make)

    def add_norm(self, rows: int) -> Operation:
        """The hidden state is read and written, an addend read, the normed state written."""
        width, eps = self._model.hidden_size, self._model.norm_eps

        def make(kernels: GpuKernels, calls: int) -> Call:
            hidden, weight = self._floats(calls, rows, width), self._floats(width)
            addend, out = self._elements(calls, rows, width), self._elements(calls, rows, width)
            return lambda at: kernels.add_norm(hidden[at], addend[at], None, weight, eps, out[at])

        return Operation("add_norm", _counted(rows), rows * width * 2 * (_FLOAT + ELEMENT_BYTES), make)

    def norm_rows(self, rows: int) -> Operation:
        """All queries of a row, read and written."""
        width, eps = self._model.query_size, self._model.norm_eps

        def make(kernels: GpuKernels, calls: int) -> Call:
            queries, weight = self._elements(calls, rows, width), self._floats(width)
            return lambda at: kernels.norm_rows(queries[at], weight, eps)

        return Operation("norm_rows", _counted(rows), rows * 2 * width * ELEMENT_BYTES, make)

    def gated(self, rows: int) -> Operation:
        inner, activation = self._model.intermediate_size, self._model.activation

        def make(kernels: GpuKernels, calls: int) -> Call:
            gate_up, out = self._elements(calls, rows, 2 * inner), self._elements(calls, rows, inner)
            return lambda at: kernels.gated(gate_up[at], activation, out[at])

        return Operation("gated", _counted(rows), rows * 3 * inner * ELEMENT_BYTES, make)

    def _one_row_products(self) -> Iterator[Operation]:
        """Those of a layer with what a step of one row fuses into them, and the head."""
        model = self._model
        hidden, inner = model.hidden_size, model.intermediate_size
        yield self.one_row_product("qkv", self._qkv_size, hidden, normed=True)
        yield self.one_row_product("output", hidden, model.query_size, added=True)
        yield self.one_row_product("gate and up", 2 * inner, hidden, normed=True, gate=model.activation)
        yield self.one_row_product("down", hidden, inner, added=True)
        yield self.one_row_product("head", model.vocab_size, hidden)

    def one_row_product(
        self,
        name: str,
        outputs: int,
        inputs: int,
        *,
        normed: bool = False,
        added: bool = False,
        gate: Activation | None = None,
    ) -> Operation:
        """The bytes are the matrix's alone: the vectors are a hundredth of it or less."""

        def make(kernels: GpuKernels, calls: int) -> Call:
            weight = self._elements(calls, outputs, inputs)
            width = outputs if gate is None else outputs // 2
            x = self._floats(1, inputs) if normed else self._elements(1, inputs)
            out = self._elements(1, width) if normed else self._floats(1, width)
            fused: dict[str, Any] = {"gate": gate, "residual": out if added else None}
            if normed:
                fused |= {"norm": self._floats(inputs), "eps": self._model.norm_eps}
            return lambda at: kernels.one_row_product(x, weight[at], out, **fused)

        size = f"{name}, {outputs:,} × {inputs:,}"
        return Operation("one_row_product", size, outputs * inputs * ELEMENT_BYTES, make)

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
                yield self.product(name, rows, outputs, inputs, gate, parts if most_parts > 1 else None)

    def product(
        self, name: str, rows: int, outputs: int, inputs: int, gate: Activation | None, parts: int | None
    ) -> Operation:
        """A gate and what it gates are multiplied into one. `parts`: of a split-K matmul, kept apart."""
        sides = 1 if gate is None else 2

        def make(kernels: GpuKernels, calls: int) -> Call:
            weight, x = self._elements(calls, sides * outputs, inputs), self._elements(calls, rows, inputs)
            out = self._elements(rows, outputs) if parts is None else self._floats(parts, rows, outputs)
            return lambda at: kernels.product(x[at], weight[at], out, gate=gate)

        size = f"{name}, {_counted(rows)}, {sides * outputs:,} × {inputs:,}"
        moved = (sides * outputs * inputs + rows * (inputs + outputs)) * ELEMENT_BYTES
        return Operation("product", size, moved, make)

    def decode_attention(self, rows: int) -> Operation:
        """Reads all that a session remembers, of which the new token comes from the matmul and is stored."""
        splits = splits_for(rows, self._model.num_kv_heads)

        def make(kernels: GpuKernels, calls: int) -> Call:
            layers, table, turns = self._layers(calls, rows), self._sessions(rows), self._turns(rows)
            qkv, out = self._attended(calls, rows)
            scratch = kernels.scratch(
                self._attention, _ELEMENT, self._device, prompt_rows=0, parts=rows * splits
            )
            return lambda at: kernels.decode_attention(
                qkv[at], layers[at], turns, table, splits, scratch, out[at]
            )

        kept = (self._plan.past_the_wrap + 1) * self._token_bytes
        moved = rows * (kept + self._query_bytes + self._rotation_bytes)
        size = f"{_counted(rows)}, {splits} split{'' if splits == 1 else 's'}"
        return Operation("decode_attention", size, moved, make)

    def store_rows(self, rows: int) -> Operation:
        """Sinks have no part in it, so that half of the rotations will do."""

        def make(kernels: GpuKernels, calls: int) -> Call:
            # As many rows of a session as displace nothing that the first of them sees.
            together = self._plan.cache.spare + 1
            number = torch.arange(rows, dtype=torch.int32, device=self._device)
            positions = self._plan.position + number % together
            table = RowTable(number // together, positions, self._ints(rows, self._plan.cache.sink))
            layers, turns = self._layers(calls, -(-rows // together)), self._turns(rows)
            qkv = self._elements(calls, rows, self._qkv_size)
            return lambda at: kernels.store_rows(qkv[at], layers[at], turns, table)

        moved = rows * (2 * self._token_bytes + self._rotation_bytes // 2)
        return Operation("store_rows", _counted(rows), moved, make)

    def prompt_attention(self, rows: int) -> Operation:
        """Reads the block, and the slab, in which the block's last tokens are stored. Every row sees as many
        tokens as a session remembers: scores and mixtures are its operations."""

        def make(kernels: GpuKernels, calls: int) -> Call:
            layers, prompt, turns = self._layers(calls, 1), self._one_segment(rows), self._turns(rows)
            qkv, out = self._attended(calls, rows)
            scratch = kernels.scratch(self._attention, _ELEMENT, self._device, prompt_rows=rows, parts=0)
            return lambda at: kernels.prompt_attention(qkv[at], layers[at], turns, prompt, scratch, out[at])

        capacity = self._plan.past_the_wrap
        slab = (capacity + min(rows, capacity)) * self._token_bytes
        moved = slab + rows * (self._token_bytes + self._query_bytes + self._rotation_bytes)
        flops = 4 * rows * capacity * self._model.query_size
        return Operation("prompt_attention", _counted(rows), moved, make, flops)

    def choose(self, rows: int, sampling: str, temperature: float, top_p: float) -> Operation:
        vocab = self._model.vocab_size

        def make(kernels: GpuKernels, calls: int) -> Call:
            table = self._sessions(rows)
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

        return Operation("choose", f"{_counted(rows)}, {sampling}", rows * vocab * _FLOAT, make)

    # Bytes of a row, or of a token in one layer.

    @property
    def _rotation_bytes(self) -> int:
        """Sines and cosines of half a head, for the window and for the sinks."""
        return 2 * self._model.head_dim * _FLOAT

    @property
    def _token_bytes(self) -> int:
        """A token's key and value."""
        return 2 * self._model.kv_size * ELEMENT_BYTES

    @property
    def _query_bytes(self) -> int:
        """A row's queries, and what attention makes of them."""
        return 2 * self._model.query_size * ELEMENT_BYTES

    # Data to call the kernels on.

    def _elements(self, *size: int) -> Tensor:
        return torch.empty(size, dtype=_ELEMENT, device=self._device).normal_()

    def _floats(self, *size: int) -> Tensor:
        return torch.randn(size, device=self._device)

    def _ints(self, count: int, value: int = 0) -> Tensor:
        return torch.full((count,), value, dtype=torch.int32, device=self._device)

    def _turns(self, rows: int) -> Tensor:
        """Rotations of each row."""
        return torch.rand(4, rows, self._model.head_dim // 2, device=self._device)

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
        query_size = self._model.query_size
        return self._elements(calls, rows, self._qkv_size), self._elements(calls, rows, query_size)


def _counted(rows: int) -> str:
    return f"{rows:,} row{'' if rows == 1 else 's'}"

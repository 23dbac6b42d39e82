"""The door to the native kernels: checks tensors, allocates results, passes addresses."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from kakeya.errors import ConfigError, CorruptCheckpoint
from kakeya.kernels.checks import address, check_angles, check_pool, check_segments, describe, row_count
from kakeya.kernels.choice import Choice, ChoiceRequest
from kakeya.kernels.network import AttentionContext, Network, NetworkLayer, NetworkShape
from kakeya.types import KernelChoice

if TYPE_CHECKING:
    from types import ModuleType

LAYOUT = 1
"""The version of the layout of packed weights. Raise it with every change: older packs are then not read."""

GROUP = 32
"""Columns that share one scale, in weights and in quantized activations."""

TILE_ROWS = 16
"""Rows of packed weights that lie beside each other."""

_FLOAT = torch.float32
# In the order of the native library's list.
FORMATS = {
    name: index
    for index, name in enumerate(
        (
            "Q4_1", "AFFINE8", "Q4_0", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4",
            "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS",
        )
    )
}  # fmt: skip
"""The formats of packed weights by GGML's names; AFFINE8 is our own, and Q4_1 has our 4 bits' arithmetic."""

BLOCK_BYTES = {
    "Q4_1": (32, 20), "Q4_0": (32, 18), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q8_0": (32, 34),
    "IQ4_NL": (32, 18), "MXFP4": (32, 17), "Q2_K": (256, 84), "Q3_K": (256, 110), "Q4_K": (256, 144),
    "Q5_K": (256, 176), "Q6_K": (256, 210), "IQ4_XS": (256, 136),
}  # fmt: skip
"""Columns and bytes of one block of each GGML format that the kernels take."""

_AFFINE = {4: FORMATS["Q4_1"], 8: FORMATS["AFFINE8"]}
_ACTIVATIONS = {"silu": False, "gelu_tanh": True}


def load(choice: KernelChoice) -> "Kernels | None":
    """The native kernels, or None where torch computes.

    AUTO gives None when the library was not built; NATIVE then raises ConfigError with the reason.
    """
    if choice is KernelChoice.TORCH:
        return None
    try:
        module = import_module("kakeya.kernels._native")
    except ImportError as error:
        if choice is KernelChoice.AUTO:
            return None
        raise ConfigError(
            f"the native kernels are not available ({error}); install the package where a C++17 compiler "
            "works, or choose kernels=torch"
        ) from error
    return Kernels(module)


@dataclass(frozen=True, slots=True)
class PackedPart:
    """Rows of quantized weights in the order the kernels read them: a format, and its tiles."""

    format: int
    outputs: int
    data: Tensor  # uint8, one dimension

    @property
    def nbytes(self) -> int:
        return self.data.numel()


class PackedMatrix:
    """A matrix of one or more parts, one below the other. Made by `Kernels.matrix`."""

    __slots__ = ("columns", "handle", "outputs", "parts")

    def __init__(self, parts: tuple[PackedPart, ...], columns: int, handle: Any) -> None:
        self.parts = parts
        self.columns = columns
        self.outputs = sum(part.outputs for part in parts)
        self.handle = handle

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Kernels:
    """The operations. Tensors are float32 on the CPU with contiguous rows unless a method says otherwise;
    anything else raises ValueError and changes nothing."""

    def __init__(self, module: "ModuleType") -> None:
        self._native = module
        self._max_head_dim: int = module.max_head_dim()

    @property
    def isa(self) -> str:
        """The instruction set in use: avx512-vnni, avx2, neon-dotprod or generic."""
        return str(self._native.isa())

    @property
    def threads(self) -> int:
        return int(self._native.threads())

    def set_threads(self, threads: int) -> None:
        """How many threads compute, the caller included; 1 until this is called. For the whole process."""
        self._native.set_threads(threads)

    def supports_head_dim(self, head_dim: int) -> bool:
        """Whether `attend` takes heads of this size: multiples of 16 up to 1,024."""
        return head_dim % 16 == 0 and 16 <= head_dim <= self._max_head_dim

    def pack(self, bits: Literal[4, 8], q: Tensor, scale: Tensor, minimum: Tensor) -> PackedPart:
        """Weights w = q * scale + minimum, with q uint8 [N, K] below 2**bits and scale and minimum
        float16 [N, K / 32]. Lossless."""
        if bits not in _AFFINE:
            raise ValueError(f"bits must be 4 or 8, got {bits}")
        if q.dtype is not torch.uint8 or q.dim() != 2 or q.shape[1] % GROUP or q.shape[1] == 0:
            raise ValueError(f"q must be uint8 [N, K] with K a multiple of {GROUP}, got {describe(q)}")
        outputs, columns = q.shape
        for name, part in (("scale", scale), ("minimum", minimum)):
            if part.dtype is not torch.float16 or part.shape != (outputs, columns // GROUP):
                raise ValueError(
                    f"{name} must be float16 [{outputs}, {columns // GROUP}], got {describe(part)}"
                )
        code = _AFFINE[bits]
        data = torch.empty(self._native.packed_bytes(code, outputs, columns), dtype=torch.uint8)
        q, scale, minimum = q.contiguous(), scale.contiguous(), minimum.contiguous()
        self._native.pack_codes(
            code, outputs, columns, q.data_ptr(), scale.data_ptr(), minimum.data_ptr(), data.data_ptr()
        )
        return PackedPart(code, outputs, data)

    def packed_bytes(self, block_format: str, outputs: int, columns: int) -> int:
        """What `pack_blocks` writes for a matrix of this size."""
        return int(self._native.packed_bytes(FORMATS[block_format], outputs, columns))

    def pack_blocks(
        self, block_format: str, blocks: Tensor, columns: int, out: Tensor | None = None
    ) -> PackedPart:
        """Rows of GGML blocks, uint8 [N, bytes of a row], as tiles: the same numbers in another order.

        `out`, uint8 of `packed_bytes`, takes the tiles where it is given. Raises CorruptCheckpoint for
        weights that are not finite.
        """
        code = _format_of(block_format)
        outputs = _block_rows(block_format, blocks, columns)
        size = self._native.packed_bytes(code, outputs, columns)
        data = torch.empty(size, dtype=torch.uint8) if out is None else out
        out_at = address(data, "out", (size,), torch.uint8)
        if not self._native.pack_blocks(code, outputs, columns, blocks.data_ptr(), out_at):
            raise CorruptCheckpoint("scales that are not finite numbers")
        return PackedPart(code, outputs, data)

    def part(self, block_format: str, outputs: int, data: Tensor) -> PackedPart:
        """Tiles that `pack_blocks` wrote before."""
        return PackedPart(_format_of(block_format), outputs, data)

    def first_rows(self, part: PackedPart, columns: int, rows: int) -> PackedPart:
        """The first `rows` rows of a part, whole tiles, in the same memory."""
        self._check_columns(part, columns)
        if rows % TILE_ROWS or not 0 < rows <= part.outputs:
            raise ValueError(
                f"rows must be a multiple of {TILE_ROWS} from {TILE_ROWS} to {part.outputs}, got {rows}"
            )
        return PackedPart(
            part.format, rows, part.data[: self._native.packed_bytes(part.format, rows, columns)]
        )

    def matrix(self, parts: Sequence[PackedPart], columns: int) -> PackedMatrix:
        """Parts that multiply the same `columns` columns, one below the other."""
        for part in parts:
            self._check_columns(part, columns)
        places = [(part.data.data_ptr(), part.format, part.outputs) for part in parts]
        return PackedMatrix(tuple(parts), columns, self._native.Matrix(places, columns))

    def dequantize_rows(self, part: PackedPart, columns: int, ids: Tensor) -> Tensor:
        """The rows `ids` (int64 [n]) of packed weights, float32 [n, columns], exactly as their format
        defines them."""
        self._check_columns(part, columns)
        if ids.dtype is not torch.int64 or ids.dim() != 1 or not ids.is_contiguous():
            raise ValueError(f"ids must be contiguous int64 [n], got {describe(ids)}")
        last = part.outputs - 1
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) <= last:
            raise ValueError(f"ids must be from 0 to {last}, got {int(ids.min())} to {int(ids.max())}")
        y = torch.empty((ids.shape[0], columns), dtype=_FLOAT)
        self._native.dequantize_rows(
            part.format, columns, part.data.data_ptr(), ids.data_ptr(), ids.shape[0], y.data_ptr()
        )
        return y

    def linear(
        self,
        x: Tensor,
        w: PackedMatrix,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """residual + x w^T + bias, as [M, N], in `out` or new: x [M, K] is rounded to 8 bits, by groups of 32
        columns or of 256 as the format asks; the products are exact integers, their sums float32."""
        rows = row_count(x, w.columns)
        y = torch.empty((rows, w.outputs), dtype=_FLOAT) if out is None else out
        y_at = address(y, "out", (rows, w.outputs))
        if rows:
            self._native.linear(
                w.handle,
                x.data_ptr(),
                x.stride(0),
                rows,
                0 if bias is None else address(bias, "bias", (w.outputs,)),
                0 if residual is None else address(residual, "residual", (rows, w.outputs)),
                y_at,
            )
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight for each row of x [M, K]."""
        columns = weight.shape[0]
        rows = row_count(x, columns)
        y = torch.empty((rows, columns), dtype=_FLOAT)
        weight_at = address(weight, "weight", (columns,))
        self._native.rms_norm(x.data_ptr(), x.stride(0), rows, columns, weight_at, eps, y.data_ptr())
        return y

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up for gate_up [M, 2 I], whose first half is the gate; activation is
        "silu" or "gelu_tanh"."""
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}")
        rows, width = gate_up.shape
        if width % 2:
            raise ValueError(f"gate_up must have an even number of columns, got {width}")
        y = torch.empty((rows, width // 2), dtype=_FLOAT)
        gate_up_at = address(gate_up, "gate_up", (rows, width))
        self._native.gated(gate_up_at, rows, width // 2, _ACTIVATIONS[activation], y.data_ptr())
        return y

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        sink_cos: Tensor,
        sink_sin: Tensor,
        pool: Tensor,
        layer: int,
        segments: Tensor,
        sinks: Tensor,
        capacity: int,
        scale: float,
        softcap: float = 0.0,
        local_window: int = 0,
    ) -> Tensor:
        """Rotary, cache write and bounded attention for one layer; returns [M, H * D].

        q [M, H, D], k and v [M, KH, D] are not rotated; each may be a view into a wider matrix. cos and sin
        [M, D / 2] turn a row to its position t, sink_cos and sink_sin to min(t, capacity - 1). pool is
        [slabs, layers, 2, KH, slots, D], float32 or bfloat16, contiguous: the new keys and values are
        written into it. segments int64 [n, 4] holds (slab, first row, rows, start position): they cover the
        rows in order and name different slabs; sinks int64 [n] is S for each. Only slots that hold a
        position the row sees are read into its result. softcap 0 and local_window 0 mean none.
        """
        rows, heads, head_dim = q.shape
        kv_heads = k.shape[1]
        slabs, layers, _, _, slots, _ = pool.shape
        self._check_heads(q, k, v)
        check_pool(pool, (2, kv_heads, slots, head_dim), layer, capacity)
        check_segments(segments, sinks)
        check_angles((cos, sin, sink_cos, sink_sin), (rows, head_dim // 2))
        out = torch.empty((rows, heads * head_dim), dtype=_FLOAT)
        rows_at = (q.data_ptr(), q.stride(0), k.data_ptr(), k.stride(0), v.data_ptr(), v.stride(0))
        angles_at = (cos.data_ptr(), sin.data_ptr(), sink_cos.data_ptr(), sink_sin.data_ptr())
        pool_at = (pool.data_ptr(), pool.dtype is torch.bfloat16, slabs, layers, slots, layer)
        segments_at = (segments.data_ptr(), sinks.data_ptr(), sinks.shape[0])
        rules = (capacity, scale, softcap, local_window)
        shape = (rows, heads, kv_heads, head_dim)
        self._native.attend(*rows_at, *shape, *angles_at, *pool_at, *segments_at, *rules, out.data_ptr())
        return out

    def choose(self, logits: Tensor, requests: Sequence[ChoiceRequest]) -> list[Choice]:
        """One token for each row of logits [rows, vocab], which are changed meanwhile and then put back."""
        assert len(logits) == len(requests), f"{len(logits)} rows of logits for {len(requests)} requests"
        vocab_size = logits.shape[1]
        row_count(logits, vocab_size, "logits")
        if not requests:
            return []
        if not vocab_size:
            raise ValueError("logits must have a column for each token, got none")
        if logits.stride(0) < vocab_size:  # views of one another, which threads would change together
            logits = logits.contiguous()
        chosen = self._native.choose(logits.data_ptr(), logits.stride(0), vocab_size, requests)
        return list(map(Choice._make, chosen))

    def uniform(self, seed: int, position: int) -> float:
        """A number in [0, 1) with 53 random bits: Philox with the seed as key and the position as counter."""
        number: float = self._native.uniform(seed, position)
        return number

    def network(self, shape: NetworkShape, layers: Sequence[NetworkLayer]) -> Network:
        """Layers that `run_network` computes in one call. Raises ValueError for weights of other sizes."""
        handle = self._native.Network(*astuple(shape))
        for layer in layers:
            handle.add_layer(*layer.arguments(shape))
        return Network(shape, layers, handle)

    def run_network(
        self,
        network: Network,
        hidden: Tensor,
        attention: AttentionContext,
        first: int = 0,
        end: int | None = None,
    ) -> None:
        """Change hidden, float32 [rows, hidden], to what it is after the layers from `first` to `end`, or to
        the last; writes to the pool."""
        shape, count = network.shape, len(network.layers)
        end = count if end is None else end
        if not 0 <= first < end <= count:
            raise ValueError(f"layers {first} to {end} are none of {count}")
        rows = row_count(hidden, shape.hidden, "hidden")
        address(hidden, "hidden", (rows, shape.hidden))
        plane = (2, shape.kv_heads, attention.pool.shape[4], shape.head_dim)
        check_pool(attention.pool, plane, end - 1, attention.capacity)
        check_segments(attention.segments, attention.sinks)
        if len(attention.tables) != count:
            raise ValueError(f"{len(attention.tables)} tables for {count} layers")
        for tables in {id(four): four for four in attention.tables}.values():
            check_angles(tables, (rows, shape.head_dim // 2))
        self._native.run_network(network.handle, *attention.arguments(first, end), rows, hidden.data_ptr())

    def _check_columns(self, part: PackedPart, columns: int) -> None:
        if part.nbytes != self._native.packed_bytes(part.format, part.outputs, columns):
            raise ValueError(
                f"a part of {part.outputs} rows and {part.nbytes} bytes has not {columns} columns"
            )

    def _check_heads(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        rows, heads, head_dim = q.shape
        if not self.supports_head_dim(head_dim):
            raise ValueError(f"head_dim must be a multiple of 16 up to {self._max_head_dim}, got {head_dim}")
        if k.shape != v.shape or k.shape[0] != rows or k.shape[2] != head_dim or heads % k.shape[1]:
            raise ValueError(f"q, k and v do not fit: {describe(q)}, {describe(k)}, {describe(v)}")
        for heads_of in (q, k, v):
            if heads_of.dtype is not _FLOAT or heads_of.stride()[1:] != (head_dim, 1):
                raise ValueError(
                    f"q, k and v must be float32 with contiguous heads, got {describe(heads_of)}"
                )


def _format_of(block_format: str) -> int:
    if block_format not in BLOCK_BYTES:
        raise ValueError(f"format must be one of {', '.join(BLOCK_BYTES)}, got {block_format}")
    return FORMATS[block_format]


def _block_rows(block_format: str, blocks: Tensor, columns: int) -> int:
    """The number of rows of uint8 [rows, bytes] that hold `columns` columns each."""
    width, size = BLOCK_BYTES[block_format]
    row_bytes = columns // width * size
    fits = columns % width == 0 and columns > 0 and blocks.dim() == 2 and blocks.shape[1] == row_bytes
    if blocks.dtype is not torch.uint8 or not fits or not blocks.is_contiguous():
        raise ValueError(
            f"{columns} columns of {block_format} must be contiguous uint8 [rows, {row_bytes}], "
            f"got {describe(blocks)}"
        )
    return blocks.shape[0]

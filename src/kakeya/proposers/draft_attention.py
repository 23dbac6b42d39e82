"""The attention of a draft over the slabs of a drafter: by the native kernel, or by torch."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kakeya.engine.bounded import visibility
from kakeya.engine.cpu.attention import rotate
from kakeya.engine.slab import KVSlab, SlabPool
from kakeya.kernels import Kernels
from kakeya.models.decoder import Attend


class DraftRows(NamedTuple):
    """One session's rows of a pass, which lie behind what its slab holds, `first` guesses further on."""

    slab: KVSlab
    first: int
    rows: int

    @property
    def start(self) -> int:
        return self.slab.written + self.first


# What makes an Attend for rows in this order, from the cos and sin of their positions [rows, head_dim / 2].
DraftAttention = Callable[[Sequence[DraftRows], Tensor, Tensor], Attend]


def draft_attention(pool: SlabPool, scale: float, kernels: Kernels | None) -> DraftAttention:
    """Writes the rows' keys and values behind what the slabs hold, and attends to the window before each."""
    if kernels is not None and kernels.supports_head_dim(pool.geometry.head_dim):
        return _native(pool, scale, kernels)
    return _torch(scale)


def _native(pool: SlabPool, scale: float, kernels: Kernels) -> DraftAttention:
    def of_pass(parts: Sequence[DraftRows], cos: Tensor, sin: Tensor) -> Attend:
        table, row = [], 0
        for part in parts:
            table.append((part.slab.index, row, part.rows, part.start))
            row += part.rows
        segments, sinks = torch.tensor(table), torch.zeros(len(parts), dtype=torch.int64)
        window = pool.geometry.cache.window

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            angles = (cos, sin, cos, sin)  # there are no sinks
            return kernels.attend(q, k, v, *angles, pool.storage, layer, segments, sinks, window, scale)

        return attend

    return of_pass


def _torch(scale: float) -> DraftAttention:
    def of_pass(parts: Sequence[DraftRows], cos: Tensor, sin: Tensor) -> Attend:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            attended, row = [], 0
            for part in parts:
                own = slice(row, row + part.rows)
                attended.append(_attend(part, layer, q[own], k[own], v[own], scale))
                row += part.rows
            return torch.cat(attended)

        return attend

    return of_pass


def _attend(part: DraftRows, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [rows, heads, d], k and v [rows, kv_heads, d], rotated -> [rows, heads * d]."""
    slab, storage = part.slab, part.slab.layer(layer)
    indices = np.arange(part.start, part.start + part.rows)
    slots = torch.from_numpy(slab.geometry.slots_of(indices, slab.sink))
    storage[0][:, slots] = k.transpose(0, 1).to(storage.dtype)
    storage[1][:, slots] = v.transpose(0, 1).to(storage.dtype)
    visible = torch.from_numpy(visibility(slab, indices, storage.shape[2], None))
    rows, heads, dim = q.shape
    kv_heads = storage.shape[1]
    # The queries that share a key head stand as rows of one matmul, so that no key is copied.
    grouped = q.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, dim)
    mixed = functional.scaled_dot_product_attention(
        grouped.to(storage.dtype),
        storage[0][None],
        storage[1][None],
        attn_mask=visible.repeat(heads // kv_heads, 1),
        scale=scale,
    )
    return mixed.float().view(kv_heads, -1, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads * dim)

"""What the native kernels compute, in plain torch and with the same arguments: slow and obvious.

Sums here are float64, so the kernels agree with them to float32 accuracy, not bit for bit; the quantized
values and the contents of the cache are the same bits.
"""

import torch
from torch import Tensor
from torch.nn import functional

GROUP = 32


def dequantize(q: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """w = q * scale + minimum in float64, [N, K]."""
    groups = q.double().view(q.shape[0], -1, GROUP)
    return (groups * scale.double()[..., None] + minimum.double()[..., None]).flatten(1)


def round_activations(x: Tensor, group: int = GROUP) -> Tensor:
    """x [M, K] with each group of columns rounded to 8 bits: absmax / 127 times whole numbers, in float64."""
    groups = x.reshape(x.shape[0], -1, group)
    most = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(most < 1e-30, 0.0, 127.0 / most)
    return ((groups * inverse).round().double() * (most / 127.0).double()).flatten(1)


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """residual + round_activations(x) w^T + bias for a dequantized w [N, K]."""
    y = round_activations(x) @ w.T
    if bias is not None:
        y = y + bias
    if residual is not None:
        y = residual + y
    return y.float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()).float()


def gated(gate_up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    active = functional.silu(gate) if activation == "silu" else functional.gelu(gate, approximate="tanh")
    return (active * up).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + D / 2) of x [heads, D] by one row's angles [D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attend(
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
    """One row at a time: write its key and value to the slab, then attend to what it sees. Changes `pool`."""
    slots, group = pool.shape[4], q.shape[1] // k.shape[1]
    out = torch.empty((q.shape[0], q.shape[1] * q.shape[2]))
    for (slab, first, rows, start), sink in zip(segments.tolist(), sinks.tolist(), strict=True):
        keys, values = pool[slab, layer]
        for row, t in enumerate(range(start, start + rows), first):
            keys[:, _slot(t, sink, slots)] = rotate(k[row], cos[row], sin[row]).to(pool.dtype)
            values[:, _slot(t, sink, slots)] = v[row].to(pool.dtype)
            seen = _seen(t, sink, capacity, local_window)
            at = [_slot(j, sink, slots) for j in seen]
            wide_keys, wide_values = (x[:, at].double().repeat_interleave(group, 0) for x in (keys, values))
            query = q[row].double()
            windowed, sunk = rotate(query, cos[row], sin[row]), rotate(query, sink_cos[row], sink_sin[row])
            is_sink = torch.tensor([j < sink for j in seen])[None, :, None]
            scores = (torch.where(is_sink, sunk[:, None], windowed[:, None]) * wide_keys).sum(-1) * scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            out[row] = torch.einsum("hs,hsd->hd", scores.softmax(-1), wide_values).flatten().float()
    return out


def _slot(position: int, sink: int, slots: int) -> int:
    return position if position < sink else sink + (position - sink) % (slots - sink)


def _seen(t: int, sink: int, capacity: int, local_window: int) -> list[int]:
    """The positions that the row at t attends to."""
    span = local_window or t + 1
    sunk = [j for j in range(min(sink, t + 1)) if min(t, capacity - 1) - j < span]
    return sunk + [j for j in range(max(sink, t - (capacity - sink) + 1), t + 1) if t - j < span]

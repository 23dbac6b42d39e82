from collections.abc import Sequence

from kakeya.kernels.choice import ChoiceRequest

def isa() -> str: ...
def set_isa(name: str) -> None: ...
def threads() -> int: ...
def set_threads(threads: int) -> None: ...
def max_head_dim() -> int: ...
def packed_bytes(bits: int, outputs: int, columns: int) -> int: ...
def pack(bits: int, outputs: int, columns: int, q: int, scales: int, minima: int, out: int) -> None: ...
def linear(
    tiles: int,
    bits: int,
    outputs: int,
    columns: int,
    x: int,
    x_stride: int,
    rows: int,
    bias: int,
    residual: int,
    y: int,
) -> None: ...
def rms_norm(x: int, x_stride: int, rows: int, columns: int, weight: int, eps: float, y: int) -> None: ...
def gated(gate_up: int, rows: int, columns: int, gelu: bool, y: int) -> None: ...
def attend(
    q: int,
    q_stride: int,
    k: int,
    k_stride: int,
    v: int,
    v_stride: int,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cos: int,
    sin: int,
    sink_cos: int,
    sink_sin: int,
    pool: int,
    bf16: bool,
    slabs: int,
    layers: int,
    slots: int,
    layer: int,
    segments: int,
    sinks: int,
    segment_count: int,
    capacity: int,
    scale: float,
    softcap: float,
    local_window: int,
    output: int,
) -> None: ...
def uniform(seed: int, position: int) -> float: ...
def choose(
    logits: int, stride: int, vocab: int, requests: Sequence[ChoiceRequest]
) -> list[tuple[int, int, float, float, list[tuple[int, float]]]]: ...

from collections.abc import Sequence

from kakeya.kernels.choice import ChoiceRequest

def isa() -> str: ...
def set_isa(name: str) -> None: ...
def threads() -> int: ...
def set_threads(threads: int) -> None: ...
def max_head_dim() -> int: ...
def packed_bytes(code: int, outputs: int, columns: int) -> int: ...
def pack_codes(code: int, outputs: int, columns: int, q: int, scales: int, minima: int, out: int) -> None: ...
def pack_blocks(code: int, outputs: int, columns: int, blocks: int, out: int) -> bool: ...
def dequantize_rows(code: int, columns: int, tiles: int, ids: int, count: int, y: int) -> None: ...

class Matrix:
    def __init__(self, parts: Sequence[tuple[int, int, int]], columns: int) -> None: ...

def linear(matrix: Matrix, x: int, x_stride: int, rows: int, bias: int, residual: int, y: int) -> None: ...
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

class Network:
    def __init__(
        self,
        hidden: int,
        inner: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        norms_span_heads: bool,
        eps: float,
        gelu: bool,
    ) -> None: ...
    def add_layer(
        self,
        norms: Sequence[int],
        qkv: tuple[Matrix, int],
        output: tuple[Matrix, int],
        gate_up: tuple[Matrix, int],
        down: tuple[Matrix, int],
        local_window: int,
    ) -> None: ...

def run_network(
    network: Network,
    first: int,
    tables: Sequence[tuple[int, int, int, int]],
    pool: int,
    bf16: bool,
    slabs: int,
    layers: int,
    slots: int,
    segments: int,
    sinks: int,
    segment_count: int,
    capacity: int,
    scale: float,
    softcap: float,
    rows: int,
    hidden: int,
) -> None: ...
def uniform(seed: int, position: int) -> float: ...
def choose(
    logits: int, stride: int, vocab: int, requests: Sequence[ChoiceRequest]
) -> list[tuple[int, int, float, float, list[tuple[int, float]]]]: ...

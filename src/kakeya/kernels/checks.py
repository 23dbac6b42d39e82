"""What the native library must be able to rely on: it is handed addresses, and checks nothing itself."""

import torch
from torch import Tensor

_FLOAT = torch.float32
_POOL_TYPES = (torch.float32, torch.bfloat16)


def address(tensor: Tensor, name: str, shape: tuple[int, ...], dtype: torch.dtype = _FLOAT) -> int:
    """The address of a contiguous tensor of this shape and type. Raises ValueError for any other."""
    if tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_contiguous():
        expected = f"contiguous {_type(dtype)} {list(shape)}"
        raise ValueError(f"{name} must be {expected}, got {describe(tensor)}")
    return tensor.data_ptr()


def row_count(x: Tensor, columns: int, name: str = "x") -> int:
    """The number of rows of a float32 [rows, columns] whose rows are contiguous."""
    if x.dtype is not _FLOAT or x.dim() != 2 or x.shape[1] != columns or x.stride(1) != 1:
        raise ValueError(f"{name} must be float32 [rows, {columns}] with contiguous rows, got {describe(x)}")
    return x.shape[0]


def check_pool(pool: Tensor, plane: tuple[int, int, int, int], layer: int, capacity: int) -> None:
    if pool.dtype not in _POOL_TYPES or not pool.is_contiguous() or pool.shape[2:] != plane:
        raise ValueError(
            f"pool must be contiguous float32 or bfloat16 [slabs, layers, {', '.join(map(str, plane))}], "
            f"got {describe(pool)}"
        )
    if not 0 <= layer < pool.shape[1] or capacity > plane[2]:
        raise ValueError(f"layer {layer} and capacity {capacity} do not fit the pool {describe(pool)}")


def check_segments(segments: Tensor, sinks: Tensor) -> None:
    fits = segments.dtype is sinks.dtype is torch.int64 and segments.shape == (sinks.shape[0], 4)
    if not fits or not segments.is_contiguous() or not sinks.is_contiguous():
        raise ValueError(
            "segments and sinks must be contiguous int64 [n, 4] and [n], "
            f"got {describe(segments)} and {describe(sinks)}"
        )


def check_angles(tables: tuple[Tensor, ...], shape: tuple[int, int]) -> None:
    for table in tables:
        if table.dtype is not _FLOAT or table.shape != shape or not table.is_contiguous():
            raise ValueError(f"cos and sin must be contiguous float32 {list(shape)}, got {describe(table)}")


def describe(tensor: Tensor) -> str:
    return f"{_type(tensor.dtype)} {list(tensor.shape)} with strides {list(tensor.stride())}"


def _type(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

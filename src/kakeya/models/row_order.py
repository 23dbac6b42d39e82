"""The order of projection rows in which the rotary pairs of heads lie where attention turns them.

Attention turns dimension i with i + head_dim / 2. A head that is rotated in part is stored with its pairs
closer together, so its rows are put in another order when they are read. Scores are sums over a head's
dimensions: they do not notice, as long as queries and keys are reordered alike.
"""

import torch
from torch import Tensor

from kakeya.errors import CorruptCheckpoint
from kakeya.models.rope import RopeConfig


def head_rows(rope: RopeConfig, heads: int) -> Tensor | None:
    """Which stored row comes where, for the rows of `heads` heads; None for no reordering."""
    order = rope.paired_order()
    if order is None:
        return None
    first = torch.arange(heads).unsqueeze(1) * rope.head_dim
    return (first + torch.tensor(order)).flatten()


def fused_rows(rope: RopeConfig, rotated_heads: int, value_rows: int) -> Tensor | None:
    """The same for queries, keys and values in one tensor: values stay behind them."""
    order = head_rows(rope, rotated_heads)
    if order is None:
        return None
    return torch.cat([order, torch.arange(len(order), len(order) + value_rows)])


def reordered(name: str, rows: Tensor, order: Tensor) -> Tensor:
    """`rows` in that order. Raises CorruptCheckpoint for a tensor that has not as many."""
    if len(rows) != len(order):
        raise CorruptCheckpoint(f"tensor {name} has {len(rows)} rows, the configuration needs {len(order)}")
    return rows[order]

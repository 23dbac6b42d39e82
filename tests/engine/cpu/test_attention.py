"""What the CPU's kernel is handed. An oracle in tests/engine says what attention must compute."""

import torch

from kakeya.config import CacheConfig
from kakeya.engine.cpu.attention import pool_of_layer
from kakeya.engine.slab import SlabGeometry, SlabPool
from kakeya.types import DType


def test_a_pool_in_the_shape_of_each_layer() -> None:
    """Two heads of 4 and one of 8 fill the same place."""
    pool = SlabPool(SlabGeometry(2, 2, 4, CacheConfig(2, 5, 3), DType.FLOAT32, ((2, 4), (1, 8))), 1)
    slab = pool.allocate()
    slab.layer(1)[:] = torch.arange(10.0)[None, None, :, None]
    assert pool_of_layer(pool, 0).shape == (1, 2, 2, 2, 10, 4)
    assert pool_of_layer(pool, 1).shape == (1, 2, 2, 1, 10, 8)
    assert pool_of_layer(pool, 1)[0, 1, 0, 0, 3].tolist() == [3.0] * 8
    assert not pool_of_layer(pool, 0)[0, 0].count_nonzero()


def test_a_pool_of_layers_that_are_alike() -> None:
    pool = SlabPool(SlabGeometry(2, 2, 4, CacheConfig(2, 5, 3), DType.FLOAT32), 1)
    assert pool_of_layer(pool, 1) is pool.storage

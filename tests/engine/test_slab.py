"""Slabs: where positions live, what a rollback brings back, what is counted."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from kakeya.config import CacheConfig
from kakeya.engine.slab import KVSlab, SlabGeometry, SlabPool
from kakeya.errors import ConfigError, InvalidArgument, InvariantViolation, NoFreeSlab, ResourceExhausted
from kakeya.types import DType


def pool(sink: int = 2, window: int = 5, spare: int = 3, count: int = 2) -> SlabPool:
    return SlabPool(SlabGeometry(3, 2, 4, CacheConfig(sink, window, spare), DType.FLOAT32), count)


def write(slab: KVSlab, count: int) -> None:
    """Store each position's own number in its slot, in every layer."""
    start = slab.reserve(count)
    for position in range(start, start + count):
        slot = slab.geometry.slots_of(np.array([position]), slab.sink)[0]
        slab.storage[:, :, :, slot] = float(position)


def held(slab: KVSlab) -> list[float]:
    return slab.storage[0, 0, 0, :, 0].tolist()


@given(st.integers(0, 6), st.integers(1, 9), st.integers(0, 4), st.integers(1, 200))
def test_a_slot_holds_the_newest_position_that_maps_to_it(
    sink: int, window: int, spare: int, length: int
) -> None:
    geometry = SlabGeometry(1, 1, 2, CacheConfig(sink, window, spare), DType.FLOAT32)
    slots = geometry.slots_of(np.arange(length), sink)
    assert slots.max() < geometry.cache.slots
    newest = {int(slot): position for position, slot in enumerate(slots)}
    needed = [p for p in range(length) if p < sink or p > length - 1 - window - spare]
    assert all(newest[int(slots[p])] == p for p in needed)


def test_geometry_counts_real_bytes() -> None:
    shared = pool(count=3)
    geometry = shared.geometry
    assert geometry.slab_bytes * 3 == shared.storage.nbytes
    assert geometry.bytes_per_token == 3 * 2 * 4 * 4 * 2


def test_live_bytes_follow_commits_to_a_plateau() -> None:
    slab = pool().allocate()
    assert slab.live_bytes == 0
    write(slab, 4)
    assert slab.live_bytes == 0
    slab.commit(4)
    assert slab.live_bytes == 4 * slab.geometry.bytes_per_token
    for length in range(5, 40):
        write(slab, 1)
        slab.commit(length)
    assert slab.live_bytes == 7 * slab.geometry.bytes_per_token


@given(st.integers(0, 40), st.integers(1, 30))
def test_a_rollback_brings_back_everything_a_next_token_needs(committed: int, block: int) -> None:
    slab = pool().allocate()
    for length in range(committed):
        write(slab, 1)
        slab.commit(length + 1)
    before = slab.slot_positions()
    write(slab, block)
    slab.rollback()
    assert slab.written == slab.committed == committed
    for slot, position in enumerate(before):
        assert position < 0 or held(slab)[slot] == position


def test_positions_are_reported_by_slot() -> None:
    slab = pool().allocate()
    for length in range(1, 14):
        write(slab, 1)
        slab.commit(length)
    positions = slab.slot_positions()
    assert sorted(p for p in positions if p >= 0) == [0, 1, 9, 10, 11, 12]
    assert all(p < 0 or held(slab)[slot] == p for slot, p in enumerate(positions))


def test_commits_never_go_back_nor_beyond_what_is_written() -> None:
    slab = pool().allocate()
    write(slab, 5)
    slab.commit(4)
    with pytest.raises(
        InvariantViolation, match="INV-2 violated: position would go back from 4 to 3"
    ) as back:
        slab.commit(3)
    assert back.value.invariant == "INV-2"
    with pytest.raises(InvariantViolation, match="INV-1"):
        slab.commit(6)


def test_pinning_takes_slots_from_the_window() -> None:
    shared = pool()
    slab = shared.allocate(5)
    assert (slab.sink, slab.window) == (5, 2)
    for bad in (-1, 7, 100):
        with pytest.raises(InvalidArgument, match="from 0 to 6"):
            shared.allocate(bad)
    assert shared.free_count == 1


def test_slabs_are_handed_out_clean_and_once() -> None:
    shared = pool()
    first, second = shared.allocate(), shared.allocate()
    assert first.index != second.index
    with pytest.raises(ResourceExhausted):
        shared.allocate()
    first.storage.fill_(float("nan"))
    shared.release(first)
    with pytest.raises(AssertionError, match="twice"):
        shared.release(first)
    assert shared.allocate().storage.abs().sum() == 0


def test_slabs_are_handed_out_once_to_many_threads() -> None:
    shared = pool()
    owned: list[int] = []

    def use(_: int) -> None:
        for _ in range(200):
            try:
                slab = shared.allocate(clean=False)
            except NoFreeSlab:
                continue
            assert slab.index not in owned
            owned.append(slab.index)
            owned.remove(slab.index)
            shared.release(slab)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, range(4)))
    assert shared.free_count == 2


def test_a_copy_is_the_committed_part() -> None:
    shared = pool()
    first, second = shared.allocate(), shared.allocate()
    write(first, 6)
    first.commit(5)
    second.copy_from(first)
    assert (second.written, second.committed) == (5, 5)
    assert torch.equal(first.storage, second.storage)
    first.storage.zero_()
    assert second.storage.abs().sum() > 0


def test_a_pool_that_cannot_be_had_shows_the_arithmetic() -> None:
    geometry = SlabGeometry(1000, 1000, 1000, CacheConfig(4, 2**20, 16), DType.FLOAT32)
    with pytest.raises(
        ConfigError, match=rf"4 slabs x {geometry.slab_bytes:,} bytes, [0-9,]+ bytes are avail"
    ):
        SlabPool(geometry, 4)


def test_a_rollback_in_layers_with_heads_of_different_sizes() -> None:
    """Two heads of 4 and one of 8 fill the same place, but a slot lies elsewhere in it."""
    geometry = SlabGeometry(2, 2, 4, CacheConfig(2, 5, 3), DType.FLOAT32, ((2, 4), (1, 8)))
    slab = SlabPool(geometry, 1).allocate()
    assert [tuple(slab.layer(index).shape) for index in range(2)] == [(2, 2, 10, 4), (2, 1, 10, 8)]
    for layer in range(2):
        slab.layer(layer)[:] = torch.arange(10.0)[None, None, :, None]
    before = slab.storage.clone()
    slab.reserve(20)
    slab.commit(20)
    slab.reserve(6)
    for layer in range(2):
        slab.layer(layer)[:, :, geometry.slots_of(np.arange(20, 26), 2)] = -1.0
    assert not torch.equal(slab.storage, before)
    slab.rollback()
    assert torch.equal(slab.storage, before)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no list of mappings here")
def test_slabs_ask_for_huge_pages() -> None:
    """Whether they get them is up to the system."""
    geometry = SlabGeometry(8, 4, 64, CacheConfig(4, 1024, 16), DType.FLOAT32)
    storage = SlabPool(geometry, 4).storage
    pattern = r"^(\w+)-(\w+) .*\n(?:.*\n)*?VmFlags: (.*)$"
    entries = re.findall(pattern, Path("/proc/self/smaps").read_text(), re.MULTILINE)
    middle = storage.data_ptr() + storage.nbytes // 2
    (flags,) = [flags for first, last, flags in entries if int(first, 16) <= middle < int(last, 16)]
    assert "hg" in flags.split()

"""Memory on the host for slabs that are away: used again, and given back to the system."""

from concurrent.futures import ThreadPoolExecutor

import psutil
import torch
from torch import Tensor

from kakeya.engine.moving import HostBuffers

SHAPE, COUNT = (200, 4096), 240  # 1.6 MB, which an allocator would keep


def test_what_threads_take_and_drop_does_not_stay_with_the_process() -> None:
    buffers = HostBuffers(torch.device("cpu"))
    large = torch.ones(2**22)
    del large  # from now on the allocator keeps pieces of this size for itself
    before = psutil.Process().memory_info().rss

    def take(number: int) -> Tensor:
        return buffers.take(SHAPE, torch.bfloat16).fill_(number)

    with ThreadPoolExecutor(8) as pool:
        held = list(pool.map(take, range(COUNT)))
        size = held[0].nbytes
        assert [int(each[-1, -1]) for each in held] == [int(torch.tensor(n).bfloat16()) for n in range(COUNT)]
        assert psutil.Process().memory_info().rss - before > 0.9 * COUNT * size
        kept = held[::8]  # so that nothing in between could be cut off in one piece
        del held
        assert psutil.Process().memory_info().rss - before < (len(kept) + 40) * size


def test_pinned_memory_takes_more_than_is_asked_for() -> None:
    pinned, plain = HostBuffers(torch.device("cuda")), HostBuffers(torch.device("cpu"))
    assert [pinned.taken_by(size) for size in (0, 1, 2, 3, 2**20, 2**20 + 1)] == [0, 1, 2, 4, 2**20, 2**21]
    assert plain.taken_by(2**20 + 1) == 2**20 + 1


def test_spare_memory_is_used_again() -> None:
    buffers = HostBuffers(torch.device("cpu"))
    buffers.provide(SHAPE, torch.float32)
    first = buffers.take(SHAPE, torch.float32)
    assert not first.any()
    place = first.data_ptr()
    buffers.give_back(first)
    assert buffers.take(SHAPE, torch.bfloat16).data_ptr() != place
    assert buffers.take(SHAPE, torch.float32).data_ptr() == place
    assert buffers.take((0, 3), torch.float32).shape == (0, 3)

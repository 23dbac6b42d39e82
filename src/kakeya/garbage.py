"""The garbage collector, told to leave alone what a start makes: objects by the hundred thousand."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Nothing is collected inside, and what is alive at the end is never looked through again.

    Importing torch alone makes the collector walk over everything several times, and each full collection
    later would hold all streams up for as long. For the start of a process of our own: what is alive at the
    end and refers to itself is not freed any more.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if collects:
            gc.enable()

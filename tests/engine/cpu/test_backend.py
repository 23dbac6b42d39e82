"""The CPU's backend: where its results lie."""

from pathlib import Path

import torch
from torch import Tensor

from kakeya.engine.batch import Segment
from kakeya.engine.cpu.backend import CpuBackend
from kakeya.engine.sequence import TokenSequence
from kakeya.types import KernelChoice, WeightFormat
from support import tiny

CONFIG = tiny.engine_config(kernels=KernelChoice.NATIVE, weights=WeightFormat.INT8)


def segment_of(backend: CpuBackend, rows: int) -> Segment:
    """The beginning of a new session, all of whose logits are wanted."""
    sequence = TokenSequence(backend.pool.allocate(), "me", [], None)
    start = sequence.slab.reserve(rows)
    return Segment(sequence, start, [5, 9, 22, 13][:rows], 0, rows)


@torch.inference_mode()
def test_steps_write_their_logits_to_the_same_memory(tiny_llama: Path) -> None:
    backend = tiny.make_backend(tiny.load(tiny_llama, CONFIG), CONFIG)

    def logits(rows: int) -> Tensor:
        segment = segment_of(backend, rows)
        result = backend.run([segment]).logits
        backend.pool.release(segment.sequence.slab)
        return result

    expected = logits(3).clone()
    place = logits(3).data_ptr()
    assert [logits(rows).data_ptr() for rows in (1, 2, 3)] == [place] * 3
    assert torch.equal(logits(4)[:3], expected), "it has grown"
    assert logits(3).data_ptr() == logits(4).data_ptr()
    (scored,) = backend.score(segment_of(backend, 3), lambda start, scored: scored)
    assert torch.equal(scored, expected)
    assert scored.data_ptr() != logits(3).data_ptr(), "a whole block would take too much memory for ever"

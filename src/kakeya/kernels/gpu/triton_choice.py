"""The choice of a token for each row in Triton: three launches, several programs a row."""

from collections.abc import Mapping

import triton
from torch import Tensor

from kakeya.kernels.gpu import launches
from kakeya.kernels.gpu.choice_scratch import BINS, LISTED, SEGMENT, ChoiceScratch, segments_of
from kakeya.kernels.gpu.device import best, cut, draw
from kakeya.kernels.gpu.interface import ChoiceTable, RowTable

_BEST_BLOCK, _BEST_WARPS, _BEST_PROGRAMS = 4096, 16, 512
_WARPS, _PROGRAMS = 8, 512
_REGISTERS = 64  # of a thread: all these programs run at once, on a device of 132 multiprocessors
_SAMPLE = 4096  # tokens of a row that tell where its filters are bound to end


def choose(
    logits: Tensor,
    rows: RowTable,
    choice: ChoiceTable,
    scratch: ChoiceScratch,
    newest: Tensor,
    chosen: Tensor,
    launch: Mapping[str, bool],
) -> None:
    """See GpuKernels; `launch` is how every program is launched."""
    count, vocab = logits.shape
    assert count <= len(scratch.arrived), f"{count} rows, room for {len(scratch.arrived)}"
    assert scratch.segments.shape[1] == segments_of(vocab), f"scratch for another vocabulary than {vocab}"
    _find_best(logits, rows, choice, scratch, newest, chosen, launch)
    parts, share = launches.shared_out(triton.cdiv(vocab, SEGMENT), count, _PROGRAMS)
    sizes = {
        "SEGMENT": SEGMENT,
        "BINS": BINS,
        "THREADS": 32 * _WARPS,
        "num_warps": _WARPS,
        "maxnreg": _REGISTERS,
        **launch,
    }
    cut.find_cut[(count, parts)](
        logits,
        rows.slabs,
        choice.temperature,
        choice.top_k,
        choice.top_p,
        scratch.arrived,
        scratch.parts,
        scratch.aims,
        scratch.bins,
        scratch.cuts,
        logits.stride(0),
        vocab,
        share,
        PARTS=segments_of(vocab),
        **sizes,
    )
    draw.draw[(count, parts)](
        logits,
        rows.slabs,
        choice.temperature,
        choice.top_p,
        choice.min_p,
        choice.seed,
        choice.positions,
        newest,
        chosen,
        scratch.arrived,
        scratch.aims,
        scratch.cuts,
        scratch.segments,
        scratch.listed,
        logits.stride(0),
        vocab,
        share,
        SEGMENTS=segments_of(vocab),
        LISTED=LISTED,
        **sizes,
    )


def _find_best(
    logits: Tensor,
    rows: RowTable,
    choice: ChoiceTable,
    scratch: ChoiceScratch,
    newest: Tensor,
    chosen: Tensor,
    launch: Mapping[str, bool],
) -> None:
    count, vocab = logits.shape
    parts, share = launches.shared_out(triton.cdiv(vocab, _BEST_BLOCK), count, _BEST_PROGRAMS)
    best.find_best[(count, parts)](
        logits,
        rows.slabs,
        choice.temperature,
        choice.top_k,
        choice.top_p,
        newest,
        chosen,
        scratch.arrived,
        scratch.parts,
        scratch.aims,
        logits.stride(0),
        vocab,
        share,
        BLOCK=_BEST_BLOCK,
        PARTS=segments_of(vocab),
        SAMPLE=_SAMPLE,
        num_warps=_BEST_WARPS,
        maxnreg=_REGISTERS,
        **launch,
    )

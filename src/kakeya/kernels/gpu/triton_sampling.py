"""Sampling in Triton: three kernels, with several programs per row."""

from collections.abc import Mapping

import triton
from torch import Tensor

from kakeya.kernels.gpu import launches
from kakeya.kernels.gpu.device import best, cutoff, draw
from kakeya.kernels.gpu.interface import RowTable, SamplingTable
from kakeya.kernels.gpu.sampling_scratch import BINS, LISTED, SEGMENT, SamplingScratch, segments_of

_BEST_BLOCK, _BEST_WARPS, _BEST_PROGRAMS = 4096, 16, 512
_WARPS, _PROGRAMS = 8, 512
_REGISTERS = 64  # of a thread: then all programs run at once on a device with 132 SMs
_SAMPLE = 4096  # tokens of a row from which the bracket of its cutoff is estimated


def sample(
    logits: Tensor,
    rows: RowTable,
    sampling: SamplingTable,
    scratch: SamplingScratch,
    newest: Tensor,
    sampled: Tensor,
    launch: Mapping[str, bool],
) -> None:
    """See GpuKernels. `launch` has the launch options of every kernel."""
    count, vocab = logits.shape
    assert count <= len(scratch.arrived), f"{count} rows, room for {len(scratch.arrived)}"
    assert scratch.segments.shape[1] == segments_of(vocab), f"scratch for another vocabulary than {vocab}"
    _find_best(logits, rows, sampling, scratch, newest, sampled, launch)
    _find_cutoff_and_draw(logits, rows, sampling, scratch, newest, sampled, launch)


def _find_cutoff_and_draw(
    logits: Tensor,
    rows: RowTable,
    sampling: SamplingTable,
    scratch: SamplingScratch,
    newest: Tensor,
    sampled: Tensor,
    launch: Mapping[str, bool],
) -> None:
    count, vocab = logits.shape
    programs, share = launches.divide_work(triton.cdiv(vocab, SEGMENT), count, _PROGRAMS)
    sizes = {
        "SEGMENT": SEGMENT,
        "BINS": BINS,
        "THREADS": 32 * _WARPS,
        "num_warps": _WARPS,
        "maxnreg": _REGISTERS,
        **launch,
    }
    cutoff.find_cutoff[(count, programs)](
        logits,
        rows.slabs,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        scratch.arrived,
        scratch.partials,
        scratch.brackets,
        scratch.bins,
        scratch.cutoffs,
        logits.stride(0),
        vocab,
        share,
        MAX_PROGRAMS=segments_of(vocab),
        **sizes,
    )
    draw.draw[(count, programs)](
        logits,
        rows.slabs,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.positions,
        newest,
        sampled,
        scratch.arrived,
        scratch.brackets,
        scratch.cutoffs,
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
    sampling: SamplingTable,
    scratch: SamplingScratch,
    newest: Tensor,
    sampled: Tensor,
    launch: Mapping[str, bool],
) -> None:
    count, vocab = logits.shape
    programs, share = launches.divide_work(triton.cdiv(vocab, _BEST_BLOCK), count, _BEST_PROGRAMS)
    best.find_best[(count, programs)](
        logits,
        rows.slabs,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        newest,
        sampled,
        scratch.arrived,
        scratch.partials,
        scratch.brackets,
        logits.stride(0),
        vocab,
        share,
        BLOCK=_BEST_BLOCK,
        MAX_PROGRAMS=segments_of(vocab),
        SAMPLE=_SAMPLE,
        num_warps=_BEST_WARPS,
        maxnreg=_REGISTERS,
        **launch,
    )

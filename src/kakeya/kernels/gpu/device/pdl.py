"""Programmatic dependent launch (PDL): a kernel's programs are placed while its predecessor still runs.

Placing programs takes a device about as long as a small kernel runs. With PDL (Hopper and later, launched
with `launch_pdl`) that time is hidden: the programs are placed early, and wait here for the predecessor's
results.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_LINE = tl.constexpr(128)  # bytes that come together


@triton.jit
def prefetch(first, count: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr):
    """Ask for `count` elements from each of `first` [rows] on, before `wait_for_predecessor`: they come into
    the L2 cache while the predecessor runs. LINES: a power of two that covers them. Nothing without PDL."""
    if PDL:
        each: tl.constexpr = _LINE * 8 // first.dtype.element_ty.primitive_bitwidth
        at = tl.minimum(tl.arange(0, LINES) * each, count - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [(first[:, None] + at[None, :]).to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait for the predecessor, then let the next kernel be placed. Every program calls this first: before
    it, a program must not read what a kernel writes, and must not write; weights may come."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

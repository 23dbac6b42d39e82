"""Programmatic dependent launch (PDL): a kernel's programs are placed while its predecessor still runs.

Placing programs takes a device about as long as a small kernel runs. With PDL (Hopper and later, launched
with `launch_pdl`) that time is hidden: the programs are placed early, and wait here for the predecessor's
results.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait_for_predecessor(PDL: tl.constexpr):
    """Wait for the predecessor, then let the next kernel be placed. Every program calls this first: before
    it, a program must not read what a kernel writes, and must not write."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()

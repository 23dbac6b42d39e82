"""Launches that follow each other closely: the next one's programs are started before this one's are done.

Starting takes a device about as long as a small program runs. In a chain (a device of Hopper's kind or later,
launched with `launch_pdl`) programs are placed while those ahead of them still run, and wait here for their
results.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Every program begins with it: before, nothing may be read that a launch writes, nor written."""
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()

"""The native kernels: quantized products, norms, gated activations, attention over slabs in place and the
choice of tokens.

`load` gives the kernels, or None where torch is to compute instead. Every operation works on CPU tensors,
lets other Python threads run while it computes (unless that is sooner done), may be called from any thread,
and gives each row bits that depend neither on the other rows of the call nor on the number of threads.
`engine.sampler` makes the same choice of tokens in numpy; the tests have the rest in plain torch.
"""

from kakeya.kernels.native import LAYOUT, Kernels, PackedMatrix, PackedPart, load

__all__ = ["LAYOUT", "Kernels", "PackedMatrix", "PackedPart", "load"]

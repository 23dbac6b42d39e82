"""The native kernels: quantized matmuls, norms, gated activations, attention over slabs in place, sampling.

`load` returns the kernels, or None where torch computes instead. Every operation works on CPU tensors, may be
called from any thread, and releases the GIL unless it is very short. The bits of a row depend neither on the
other rows of the call nor on the number of threads. `engine.sampler` defines the sampling in numpy; the tests
have the other operations in plain torch.
"""

from kakeya.kernels.native import LAYOUT, Kernels, PackedMatrix, PackedPart, load

__all__ = ["LAYOUT", "Kernels", "PackedMatrix", "PackedPart", "load"]

"""The CUDA backend: dense weights and slabs on the device, fused steps, captured graphs.

`CudaBackend` is written for any torch device. On a CPU, with the torch kernels and without graphs, it is the
test double of itself.
"""

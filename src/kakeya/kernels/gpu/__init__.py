"""Kernels of the CUDA backend: attention over slabs, the operations between matmuls, small matmuls, sampling.

`load_gpu_kernels` returns Triton kernels where there is a CUDA device and Triton, and plain torch otherwise.
Both implement `GpuKernels` and agree up to rounding. The torch kernels run on any device.
"""

from kakeya.kernels.gpu.interface import (
    MAX_K_SPLITS,
    MAX_KV_SPLITS,
    READ_TOGETHER,
    SEGMENT_FIELDS,
    TILE_ROWS,
    Activation,
    AttentionLayer,
    AttentionShape,
    DraftTable,
    GpuKernels,
    PrefillTable,
    RowTable,
    SamplingTable,
    Scratch,
    kv_splits,
)
from kakeya.kernels.gpu.launches import MAX_MATMUL_ROWS
from kakeya.kernels.gpu.loading import load_gpu_kernels
from kakeya.kernels.gpu.sampling_scratch import SamplingScratch

__all__ = [
    "MAX_KV_SPLITS",
    "MAX_K_SPLITS",
    "MAX_MATMUL_ROWS",
    "READ_TOGETHER",
    "SEGMENT_FIELDS",
    "TILE_ROWS",
    "Activation",
    "AttentionLayer",
    "AttentionShape",
    "DraftTable",
    "GpuKernels",
    "PrefillTable",
    "RowTable",
    "SamplingScratch",
    "SamplingTable",
    "Scratch",
    "kv_splits",
    "load_gpu_kernels",
]

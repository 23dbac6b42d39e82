"""Kernels of the device backend: attention over slabs, what lies between products, the choice of tokens.

`load_gpu_kernels` gives Triton's where there is a CUDA device and Triton, plain torch otherwise. Both
implement `GpuKernels` and agree to rounding; the torch ones run on any device.
"""

from kakeya.kernels.gpu.choice_scratch import ChoiceScratch
from kakeya.kernels.gpu.interface import (
    MAX_PARTS,
    MAX_SPLITS,
    SEGMENT_FIELDS,
    TILE_ROWS,
    Activation,
    AttentionLayer,
    AttentionShape,
    ChoiceTable,
    GpuKernels,
    PromptTable,
    RowTable,
    Scratch,
    splits_for,
)
from kakeya.kernels.gpu.launches import MAX_PRODUCT_ROWS
from kakeya.kernels.gpu.loading import load_gpu_kernels

__all__ = [
    "MAX_PARTS",
    "MAX_PRODUCT_ROWS",
    "MAX_SPLITS",
    "SEGMENT_FIELDS",
    "TILE_ROWS",
    "Activation",
    "AttentionLayer",
    "AttentionShape",
    "ChoiceScratch",
    "ChoiceTable",
    "GpuKernels",
    "PromptTable",
    "RowTable",
    "Scratch",
    "load_gpu_kernels",
    "splits_for",
]

"""The float types that tensors are held in: torch's for ours, and their names."""

import torch

from kakeya.types import DType

FLOAT_TYPES = {DType.FLOAT32: torch.float32, DType.BFLOAT16: torch.bfloat16}
FLOAT_NAMES = {torch.float32: "float32", torch.bfloat16: "bf16"}

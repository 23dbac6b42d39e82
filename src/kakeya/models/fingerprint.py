"""A stable id for a model's weights that is cheap for files of any size."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable

from torch import Tensor

from kakeya.models.config import ModelConfig

_SAMPLES = 4
_SAMPLE_BYTES = 32


def fingerprint(config: ModelConfig, tensors: Iterable[tuple[str, str, Tensor]]) -> str:
    """SHA-256 over the config and, for each (name, type and shape, flat uint8 bytes), a few sampled bytes."""
    digest = hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode())
    for name, description, data in tensors:
        digest.update(f"\n{name} {description} ".encode())
        digest.update(_sample(data))
    return digest.hexdigest()


def _sample(data: Tensor) -> bytes:
    """Evenly spaced bits of the tensor, its beginning and its end included."""
    last = max(0, data.numel() - _SAMPLE_BYTES)
    starts = [last * index // (_SAMPLES - 1) for index in range(_SAMPLES)]
    return b"".join(data[start : start + _SAMPLE_BYTES].numpy().tobytes() for start in starts)

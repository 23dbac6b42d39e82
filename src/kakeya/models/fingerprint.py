"""A stable id for a model's weights that is cheap for files of any size."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from kakeya.models.config import ModelConfig

_SAMPLES = 4
_SAMPLE_BYTES = 32


def fingerprint(config: ModelConfig, tensors: Iterable[tuple[str, str, Tensor]]) -> str:
    """SHA-256 over the config and, for each (name, type and shape, flat uint8 bytes), a few sampled bytes."""
    digest = hashlib.sha256(json.dumps(_facts(config), sort_keys=True).encode())
    for name, description, data in tensors:
        digest.update(f"\n{name} {description} ".encode())
        digest.update(_sample(data))
    return digest.hexdigest()


def _facts(config: ModelConfig) -> dict[str, Any]:
    """The config without fields that have their default. So a field that comes with a later family does not
    change the ids of earlier models, nor lose the sessions that were saved under them."""
    facts = dataclasses.asdict(config)
    for field in dataclasses.fields(config):
        if field.default is not dataclasses.MISSING and getattr(config, field.name) == field.default:
            del facts[field.name]
    facts["qk_norm"] = {None: False, "head": True}.get(config.qk_norm, config.qk_norm)
    for rope in facts["layer_ropes"]:
        if rope["rotated"] is None:
            del rope["rotated"]
        scaling = rope["scaling"] or {}
        if "divisors" in scaling and scaling["attention_factor"] == 1.0:
            del scaling["attention_factor"]
    return facts


def _sample(data: Tensor) -> bytes:
    """Evenly spaced bits of the tensor, its beginning and its end included."""
    last = max(0, data.numel() - _SAMPLE_BYTES)
    starts = [last * index // (_SAMPLES - 1) for index in range(_SAMPLES)]
    return b"".join(data[start : start + _SAMPLE_BYTES].numpy().tobytes() for start in starts)

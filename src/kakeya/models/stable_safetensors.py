"""Safetensors whose bytes follow from what they hold: the library writes its metadata in any order."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

_ALIGNED = 8


def save_stable(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file. One that was there before stays whole until this one is."""
    data = save(dict(tensors), dict(metadata))
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % _ALIGNED)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(len(header).to_bytes(8, "little"))
        file.write(header)
        file.write(memoryview(data)[8 + length :])
    partial.replace(path)

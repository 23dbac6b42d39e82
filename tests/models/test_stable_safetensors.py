"""Files with the same content have the same bytes, and are safetensors like any other."""

from pathlib import Path

import torch
from safetensors import safe_open

from kakeya.models.stable_safetensors import save_stable

TENSORS = {"b": torch.arange(5, dtype=torch.int32), "a": torch.full((2, 3), 0.5, dtype=torch.bfloat16)}
METADATA = {name: f"größe {name}" for name in "hgfedcba"}


def test_the_same_content_is_the_same_bytes(tmp_path: Path) -> None:
    written = set()
    for _ in range(5):
        save_stable(tmp_path / "it", TENSORS, METADATA)
        written.add((tmp_path / "it").read_bytes())
    assert len(written) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    save_stable(tmp_path / "it", TENSORS, METADATA)
    with safe_open(tmp_path / "it", "pt") as file:
        assert file.metadata() == METADATA
        assert {name: file.get_tensor(name).tolist() for name in file.keys()} == {
            name: tensor.tolist() for name, tensor in TENSORS.items()
        }

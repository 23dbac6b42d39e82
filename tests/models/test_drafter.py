"""A drafter's file: what is written comes back, and what is damaged is named."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kakeya.errors import CorruptCheckpoint, ModelNotFound
from kakeya.models.config import LayerHeads
from kakeya.models.drafter import FORMAT, VERSION, DrafterConfig, read_drafter, write_drafter
from support.tiny import parse_config, random_drafter

CONFIG = DrafterConfig(
    kind="steps",
    taps=(0, 1),
    block=4,
    layers=1,
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    vocab_size=64,
    draft_vocab_size=64,
    norm_eps=1e-5,
    verifier="of a test",
)

ALL = torch.arange(64)


def tensors_of(config: DrafterConfig) -> dict[str, torch.Tensor]:
    return {name: torch.randn(shape) for name, shape in config.shapes.items()}


@pytest.mark.parametrize("kind", ["steps", "block"])
def test_what_is_written_comes_back(tmp_path: Path, kind: str) -> None:
    config = replace(CONFIG, kind=kind)  # type: ignore[arg-type]
    tensors = tensors_of(config)
    write_drafter(tmp_path / "it", config, tensors, ALL, {"licence": "ours"})
    stored = read_drafter(tmp_path / "it")
    assert stored.config == config
    assert stored.notes == {"licence": "ours"}
    assert len(stored.digest) == 64
    assert set(stored.tensors) == set(tensors)
    assert torch.equal(stored.tensors["final_norm"], tensors["final_norm"])
    matrix = tensors["layers.0.qkv"]
    error = (stored.tensors["layers.0.qkv"] - matrix).abs()
    assert (error <= matrix.abs().amax(1, keepdim=True) / 254 + 1e-7).all()  # half a step of 8 bits


def test_the_tokens_that_it_can_guess_come_back(tmp_path: Path) -> None:
    config, ids = replace(CONFIG, draft_vocab_size=3), torch.tensor([2, 5, 63])
    write_drafter(tmp_path / "it", config, tensors_of(config), ids, {})
    assert read_drafter(tmp_path / "it").draft_vocab.tolist() == ids.tolist()


@pytest.mark.parametrize("ids", [[], [2, 5], [2, 5, 5], [5, 2, 9], [-1, 2, 5], [2, 5, 64]])
def test_damaged_ids_of_guesses_are_named(tmp_path: Path, ids: list[int]) -> None:
    config = replace(CONFIG, draft_vocab_size=3)
    write_drafter(tmp_path / "it", config, tensors_of(config), torch.tensor(ids, dtype=torch.int32), {})
    with pytest.raises(CorruptCheckpoint, match="draft_vocab must be 3 ascending ids below 64"):
        read_drafter(tmp_path / "it")


def test_a_first_version_can_guess_all_tokens(tmp_path: Path) -> None:
    write_drafter(tmp_path / "it", CONFIG, tensors_of(CONFIG), ALL, {})
    with safe_open(tmp_path / "it", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if name != "draft_vocab"}
        metadata = file.metadata()
    old = json.loads(metadata["config"])
    del old["draft_vocab_size"]
    save_file(tensors, tmp_path / "old", metadata | {"version": "1", "config": json.dumps(old)})
    stored = read_drafter(tmp_path / "old")
    assert (stored.config, stored.draft_vocab.tolist()) == (CONFIG, ALL.tolist())


def test_a_row_of_zeros_stays_one(tmp_path: Path) -> None:
    tensors = tensors_of(CONFIG)
    tensors["layers.0.down"][3] = 0.0
    write_drafter(tmp_path / "it", CONFIG, tensors, ALL, {})
    assert not read_drafter(tmp_path / "it").tensors["layers.0.down"][3].any()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no drafter at .*nothing"):
        read_drafter(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [
        ({}, "is not a kakeya-drafter file"),
        ({"format": FORMAT, "version": "0"}, "of version 1 or 2"),
        ({"format": FORMAT, "version": VERSION}, "configuration is damaged"),
        ({"format": FORMAT, "version": VERSION, "config": "{}"}, "configuration is damaged: KeyError"),
        (
            {"format": FORMAT, "version": VERSION, "config": json.dumps(asdict(CONFIG) | {"taps": [1, 0]})},
            "ascending taps",
        ),
        (
            {"format": FORMAT, "version": VERSION, "config": json.dumps(asdict(CONFIG))},
            r"fuse.weight must have shape \(16, 32\), it is missing",
        ),
    ],
)
def test_a_damaged_file_is_refused(tmp_path: Path, metadata: dict[str, str], complaint: str) -> None:
    save_file({"final_norm": torch.zeros(16)}, tmp_path / "it", metadata)
    with pytest.raises(CorruptCheckpoint, match=complaint):
        read_drafter(tmp_path / "it")


def test_a_matrix_without_its_scales_is_refused(tmp_path: Path) -> None:
    write_drafter(tmp_path / "it", CONFIG, tensors_of(CONFIG), ALL, {})
    with safe_open(tmp_path / "it", framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    del tensors["fuse.weight.scale"]
    save_file(tensors, tmp_path / "it", metadata)
    with pytest.raises(CorruptCheckpoint, match=r"fuse.weight.scale must have shape \(16,\), it is missing"):
        read_drafter(tmp_path / "it")


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "it").write_text("no drafter")
    with pytest.raises(CorruptCheckpoint, match="cannot be read as a drafter"):
        read_drafter(tmp_path / "it")


def test_another_model_is_refused() -> None:
    model = parse_config()
    fitting = replace(
        CONFIG,
        **{
            name: getattr(model, name)
            for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
        },
    )
    fitting.check_fits(model)
    with pytest.raises(CorruptCheckpoint, match="with vocab_size 7, this one has"):
        replace(fitting, vocab_size=7).check_fits(model)
    with pytest.raises(CorruptCheckpoint, match=f"reads layer {model.num_layers}, and the model has"):
        replace(fitting, taps=(0, model.num_layers)).check_fits(model)


def test_a_model_whose_layers_differ_in_their_heads_has_no_drafter() -> None:
    model = parse_config()
    shape = random_drafter(model).config
    shape.check_fits(model)
    differing = replace(
        model, layer_heads=(LayerHeads(model.num_kv_heads, model.head_dim),) * model.num_layers
    )
    with pytest.raises(CorruptCheckpoint, match="its layers' heads differ"):
        shape.check_fits(differing)

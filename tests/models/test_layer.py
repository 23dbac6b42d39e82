"""One layer, whatever its matrices are."""

from dataclasses import fields

import torch

from kakeya.models.layer import Layer

NORM = torch.ones(3)
LAYER = Layer(
    input_norm=NORM,
    qkv=1,
    query_norm=None,
    key_norm=None,
    output=2,
    post_attention_norm=None,
    mlp_norm=NORM * 2,
    gate_up=3,
    down=4,
    post_mlp_norm=None,
    scalar=torch.ones(1),
)


def test_a_mapped_layer_has_other_matrices_and_the_same_vectors() -> None:
    seen: list[tuple[str, int]] = []
    mapped = LAYER.map(lambda name, matrix: seen.append((name, matrix)) or f"{name}{matrix}")
    assert seen == [("qkv", 1), ("output", 2), ("gate_up", 3), ("down", 4)] == list(LAYER.matrices.items())
    assert mapped.matrices == {"qkv": "qkv1", "output": "output2", "gate_up": "gate_up3", "down": "down4"}
    for field in fields(Layer):
        if field.name not in LAYER.matrices:
            assert getattr(mapped, field.name) is getattr(LAYER, field.name)


def test_vectors_that_are_there_are_mapped_too() -> None:
    mapped = LAYER.map(lambda _, matrix: matrix, lambda vector: -vector)
    assert mapped.matrices == LAYER.matrices
    assert mapped.query_norm is None
    for name in ("input_norm", "mlp_norm", "scalar"):
        assert torch.equal(getattr(mapped, name), -getattr(LAYER, name))

"""The decoder's own doors: its parameters, what it hands to attention and to a tap, exact bits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from kakeya.types import DType, KernelChoice, Numerics, WeightFormat
from support import tiny
from support.families import plain_attend

TOKENS = torch.randint(0, tiny.VOCAB, (24,), generator=torch.Generator().manual_seed(1)).tolist()


def test_parameters_are_counted_once(tiny_model: Path) -> None:
    stored = sum(tensor.numel() for tensor in load_file(tiny_model / "model.safetensors").values())
    for weights in WeightFormat:
        assert tiny.load(tiny_model, tiny.engine_config(weights=weights)).num_parameters == stored


@pytest.mark.parametrize("kernels", [KernelChoice.TORCH, KernelChoice.NATIVE])
def test_exact_decoding_of_any_batch(kernels: KernelChoice, tiny_model: Path) -> None:
    """All but attention: a row's hidden state and logits have the same bits in every company."""
    exact = tiny.engine_config(numerics=Numerics.EXACT, kernels=kernels)
    for dtype, weights in (
        (DType.FLOAT32, WeightFormat.AUTO),
        (DType.BFLOAT16, WeightFormat.AUTO),
        (DType.BFLOAT16, WeightFormat.INT4),
    ):
        decoder = tiny.load(tiny_model, replace(exact, dtype=dtype, weights=weights))

        def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return (q + k.repeat_interleave(2, dim=1) + v.repeat_interleave(2, dim=1)).flatten(1)

        with torch.inference_mode():
            together = decoder.logits(decoder.forward(torch.tensor(TOKENS), attend))
            for place, token in enumerate(TOKENS):
                alone = decoder.logits(decoder.forward(torch.tensor([token]), attend))
                assert torch.equal(alone[0], together[place])


def test_tap_sees_every_layer(tiny_model: Path) -> None:
    decoder = tiny.load(tiny_model, tiny.engine_config())
    seen: list[tuple[int, torch.Tensor]] = []
    with torch.inference_mode():
        attend = plain_attend(decoder.config, len(TOKENS))
        tapped = decoder.forward(
            torch.tensor(TOKENS), attend, lambda layer, hidden: seen.append((layer, hidden.clone()))
        )
        plain = decoder.forward(torch.tensor(TOKENS), attend)
    assert torch.equal(tapped, plain)
    assert [layer for layer, _ in seen] == [0, 1]
    weight = load_file(tiny_model / "model.safetensors")["model.norm.weight"]
    last = torch.nn.functional.rms_norm(seen[-1][1], (32,), weight, 1e-5)
    assert torch.allclose(last, plain, atol=1e-6)


def test_attend_is_handed_views_of_one_result(tiny_model: Path) -> None:
    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        assert (q.shape, k.shape, v.shape) == ((3, 4, 16), (3, 2, 16), (3, 2, 16))
        assert (
            q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        )
        assert q.stride() == k.stride() == v.stride() == (128, 16, 1)
        return torch.zeros(3, 64)

    with torch.inference_mode():
        tiny.load(tiny_model, tiny.engine_config()).forward(torch.tensor([1, 2, 3]), attend)

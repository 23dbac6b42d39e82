"""Which sampler an engine chooses its tokens with, and that a session cannot tell."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kakeya.engine import host
from kakeya.engine.cpu.sampler import native_sampler
from kakeya.engine.sampler import Sampler, SampleRequest, sample
from kakeya.kernels import Kernels
from kakeya.types import KernelChoice, SamplingParams, TokenEvent
from support import tiny
from support.tiny import answer, new_session, tiny_runtime

SAMPLING = SamplingParams(
    temperature=1.5, top_p=0.9, repetition_penalty=1.3, frequency_penalty=0.1, seed=5, top_logprobs=2
)


@pytest.fixture
def chosen_natively(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of the native sampler chose."""
    pytest.importorskip("kakeya.kernels._native", reason="the native kernels are not built here")
    calls: list[int] = []

    def counting(kernels: Kernels) -> Sampler:
        choose = native_sampler(kernels)

        def count(logits: torch.Tensor, requests: Sequence[SampleRequest]) -> list[TokenEvent]:
            calls.append(len(requests))
            return choose(logits, requests)

        return count

    monkeypatch.setattr(host, "native_sampler", counting)
    return calls


def tokens(directory: Path, kernels: KernelChoice) -> list[int]:
    with tiny_runtime(directory, tiny.engine_config(threads=1, kernels=kernels)) as runtime:
        events = answer(runtime, new_session(runtime), 40, sampling=SAMPLING)
    return [event.token_id for event in events if isinstance(event, TokenEvent)]


def test_native_kernels_choose_the_samplers_tokens(
    tiny_llama: Path, chosen_natively: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    native = tokens(tiny_llama, KernelChoice.NATIVE)
    assert len(native) == sum(chosen_natively) == 40

    def numpy_sampler(kernels: Kernels) -> Sampler:
        return sample

    monkeypatch.setattr(host, "native_sampler", numpy_sampler)
    assert tokens(tiny_llama, KernelChoice.NATIVE) == native


def test_without_them_numpy_chooses(tiny_llama: Path, chosen_natively: list[int]) -> None:
    assert len(tokens(tiny_llama, KernelChoice.TORCH)) == 40
    assert chosen_natively == []

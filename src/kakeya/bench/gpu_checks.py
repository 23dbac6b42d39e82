"""What must be equal: a session's bits in exact numerics, and greedy tokens on the device and on the CPU."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import torch

from kakeya.bench.gpu_plan import GpuPlan
from kakeya.bench.gpu_rig import Rig
from kakeya.bench.gpu_runtime import generated, sessions
from kakeya.bench.machine import public_name
from kakeya.bench.prose import prose, stretch
from kakeya.config import EngineConfig
from kakeya.runtime import Runtime
from kakeya.types import BackendChoice, DType, KernelChoice, SamplingParams, TokenEvent, WeightFormat

# As much of the distribution as a stream can show: equal log-probabilities come from equal logits.
_SEEN = SamplingParams(logprobs=True, top_logprobs=20)

Row = dict[str, Any]


def identity_rows(rig: Rig, plan: GpuPlan) -> list[Row]:
    """One session's tokens and log-probabilities, among others and with its prompt cut, beside those alone.

    The cut is a turn: some tokens are read and one is generated before the rest is appended. Alone, all of
    them are appended at once.
    """
    first = rig.random_tokens(plan.exact_cut, seed=1)
    rest = rig.random_tokens(plan.exact_prompt - plan.exact_cut - 1, seed=2)
    with sessions(rig.runtime, [first]) as (session_id,):
        [[between]] = generated(rig.runtime, [session_id], 1)
        rig.runtime.append(session_id, rest)
        cut = _seen(rig.runtime, [session_id], plan)
    whole = [*first, between.token_id, *rest]
    with sessions(rig.runtime, [whole]) as alone_id:
        alone = _seen(rig.runtime, alone_id, plan)
    others = [rig.random_tokens(plan.exact_others, seed=3 + n) for n in range(plan.exact_rows - 1)]
    with sessions(rig.runtime, [whole, *others]) as together:
        among = _seen(rig.runtime, together, plan)
    return [
        _identity(rig, f"one of {plan.exact_rows}", alone, among),
        _identity(rig, f"prompt cut after {plan.exact_cut:,} tokens", alone, cut),
    ]


def _seen(runtime: Runtime, session_ids: Sequence[str], plan: GpuPlan) -> list[TokenEvent]:
    """What the first of them generates while the others do."""
    return generated(runtime, session_ids, plan.exact_tokens, lambda _: _SEEN)[0]


def _identity(rig: Rig, how: str, alone: list[TokenEvent], other: list[TokenEvent]) -> Row:
    return {"shape": rig.shape.name, "how": how, "tokens": len(alone), "identical": alone == other}


def parity_rows(model: str, plan: GpuPlan, device: torch.device) -> list[Row]:
    """Greedy tokens of real weights in float32, on the device and on the CPU, for several prompts."""
    on_cpu = EngineConfig(
        backend=BackendChoice.CPU,
        cache=plan.cache,
        capacity=len(plan.parity_prompts),
        dtype=DType.FLOAT32,
        weights=WeightFormat.FLOAT32,
        kernels=KernelChoice.TORCH,
        prefill_block=plan.prefill_block,
        max_batch_tokens=plan.max_batch_tokens,
    )
    on_device = replace(on_cpu, backend=BackendChoice(device.type), kernels=KernelChoice.AUTO)
    expected, found = _greedy(model, on_cpu, plan), _greedy(model, on_device, plan)
    return [
        _parity(model, length, ours, theirs)
        for length, ours, theirs in zip(plan.parity_prompts, found, expected, strict=True)
    ]


def _greedy(model: str, config: EngineConfig, plan: GpuPlan) -> list[list[int]]:
    with Runtime.open(model, config) as runtime:
        text = runtime.tokenizer.encode(prose())
        # Each prompt from another place, one behind the other.
        starts = [sum(plan.parity_prompts[:place]) for place in range(len(plan.parity_prompts))]
        prompts = [stretch(text, *where) for where in zip(starts, plan.parity_prompts, strict=True)]
        with sessions(runtime, prompts) as session_ids:
            answers = generated(runtime, session_ids, plan.parity_tokens)
    return [[event.token_id for event in events] for events in answers]


def _parity(model: str, length: int, found: list[int], expected: list[int]) -> Row:
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found, expected, strict=True)))
    return {
        "model": public_name(model),
        "prompt_tokens": length,
        "tokens": len(expected),
        "equal_tokens": equal,
        "identical": found == expected,
    }

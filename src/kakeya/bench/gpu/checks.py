"""What must be equal: a session's bits in exact numerics, and greedy tokens on the device and on the CPU."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch

from kakeya.bench.gpu.plan import GpuPlan
from kakeya.bench.gpu.results import Identity, Parity
from kakeya.bench.gpu.rig import Rig
from kakeya.bench.gpu.runtime import generated, sessions
from kakeya.bench.machine import public_name
from kakeya.bench.text import prose, stretch
from kakeya.config import EngineConfig
from kakeya.runtime import Runtime
from kakeya.types import BackendChoice, DType, KernelChoice, SamplingParams, TokenEvent, WeightFormat

# As much of the distribution as a stream can show: equal log-probabilities come from equal logits.
_SEEN = SamplingParams(logprobs=True, top_logprobs=20)


def identity_rows(rig: Rig, plan: GpuPlan) -> list[Identity]:
    """One session's tokens and log-probabilities, among others and with its prompt cut, beside those alone.

    The cut is a turn: some tokens are read and one is generated before the rest is appended. Alone, all of
    them are appended at once.
    """
    shape = rig.shape
    first = shape.random_tokens(plan.exact_cut, seed=1)
    rest = shape.random_tokens(plan.exact_prompt - plan.exact_cut - 1, seed=2)
    with sessions(rig.runtime, [first]) as (session_id,):
        [[between]] = generated(rig.runtime, [session_id], 1)
        rig.runtime.append(session_id, rest)
        cut = _seen(rig.runtime, [session_id], plan)
    whole = [*first, between.token_id, *rest]
    with sessions(rig.runtime, [whole]) as alone_id:
        alone = _seen(rig.runtime, alone_id, plan)
    others = [shape.random_tokens(plan.exact_others, seed=3 + n) for n in range(plan.exact_rows - 1)]
    with sessions(rig.runtime, [whole, *others]) as together:
        among = _seen(rig.runtime, together, plan)
    return [
        Identity(shape.name, how, tokens=len(alone), identical=alone == other)
        for how, other in (
            (f"one of {plan.exact_rows}", among),
            (f"prompt cut after {plan.exact_cut:,} tokens", cut),
        )
    ]


def _seen(runtime: Runtime, session_ids: Sequence[str], plan: GpuPlan) -> list[TokenEvent]:
    """What the first of them generates while the others do."""
    return generated(runtime, session_ids, plan.exact_tokens, lambda _: _SEEN)[0]


def parity_rows(model: str, plan: GpuPlan, device: torch.device) -> list[Parity]:
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
        parity(public_name(model), length, ours, theirs)
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


def parity(model: str, prompt_tokens: int, found: list[int], expected: list[int]) -> Parity:
    """How far the tokens found are those expected."""
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found, expected, strict=True)))
    return Parity(model, prompt_tokens, len(expected), equal, found == expected)

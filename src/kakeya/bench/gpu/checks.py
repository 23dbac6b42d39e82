"""What must be equal: a session's bits in exact numerics, and greedy tokens on the device and on the CPU."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch

from kakeya.bench.gpu.models import OpenModel
from kakeya.bench.gpu.plan import GpuPlan
from kakeya.bench.gpu.results import Identity, Parity
from kakeya.bench.gpu.runtime import generated, sessions
from kakeya.bench.machine import public_name
from kakeya.bench.text import prose, stretch
from kakeya.config import EngineConfig
from kakeya.runtime import Runtime
from kakeya.types import BackendChoice, DType, KernelChoice, SamplingParams, TokenEvent, WeightFormat

# As much of the distribution as a stream can show: equal log-probabilities come from equal logits.
_SEEN = SamplingParams(logprobs=True, top_logprobs=20)


def identity_rows(model: OpenModel, plan: GpuPlan) -> list[Identity]:
    """Compare a session's tokens and log-probabilities with those of the session alone: among other sessions,
    and with its prompt cut by a turn of one generated token. Alone, the whole prompt is appended at once."""
    shape, runtime = model.shape, model.runtime

    def seen(session_ids: Sequence[str]) -> list[TokenEvent]:
        return generated(runtime, session_ids, plan.exact_tokens, _SEEN)[0]

    first = shape.random_tokens(plan.exact_cut, seed=1)
    rest = shape.random_tokens(plan.exact_prompt - plan.exact_cut - 1, seed=2)
    with sessions(runtime, [first]) as session_ids:
        [[between]] = generated(runtime, session_ids, 1)
        runtime.append(session_ids[0], rest)
        cut = seen(session_ids)
    whole = [*first, between.token_id, *rest]
    with sessions(runtime, [whole]) as session_ids:
        alone = seen(session_ids)
    others = [shape.random_tokens(plan.exact_others, seed=3 + n) for n in range(plan.exact_rows - 1)]
    with sessions(runtime, [whole, *others]) as session_ids:
        among = seen(session_ids)
    compared = {f"one of {plan.exact_rows}": among, f"prompt cut after {plan.exact_cut:,} tokens": cut}
    return [
        Identity(shape.name, how, len(alone), identical=alone == tokens) for how, tokens in compared.items()
    ]


def parity_rows(model: str, plan: GpuPlan, device: torch.device) -> list[Parity]:
    """Greedy tokens of real weights in float32, on the device and on the CPU, for several prompts."""
    precision = {"dtype": DType.FLOAT32, "weights": WeightFormat.FLOAT32, "kernels": KernelChoice.TORCH}
    on_cpu = plan.engine_config(len(plan.parity_prompts), backend=BackendChoice.CPU, **precision)
    on_device = replace(on_cpu, backend=BackendChoice(device.type), kernels=KernelChoice.AUTO)
    expected, found = _greedy(model, on_cpu, plan), _greedy(model, on_device, plan)
    return [
        parity(public_name(model), length, ours, theirs)
        for length, ours, theirs in zip(plan.parity_prompts, found, expected, strict=True)
    ]


def _greedy(model: str, config: EngineConfig, plan: GpuPlan) -> list[list[int]]:
    with Runtime.open(model, config) as runtime:
        text = runtime.tokenizer.encode(prose())
        # Prompts come from one text, one behind the other.
        starts = [sum(plan.parity_prompts[:place]) for place in range(len(plan.parity_prompts))]
        prompts = [stretch(text, *where) for where in zip(starts, plan.parity_prompts, strict=True)]
        with sessions(runtime, prompts) as session_ids:
            answers = generated(runtime, session_ids, plan.parity_tokens)
    return [[event.token_id for event in events] for events in answers]


def parity(model: str, prompt_tokens: int, found: list[int], expected: list[int]) -> Parity:
    equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found, expected, strict=True)))
    return Parity(model, prompt_tokens, len(expected), equal, found == expected)

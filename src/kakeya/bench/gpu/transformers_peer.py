"""transformers beside us on the same device: the same shape with random weights, bf16, the same prompts.

`generate_batch` runs in a process of its own, which is killed when it takes too long: the call waits for a
thread of the library's, with no limit of its own. Run as a program this module answers one JSON request: one
call to warm up, then one that is timed.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from kakeya.bench.gpu.plan import GpuPlan
from kakeya.bench.gpu.results import GENERATE_BATCH
from kakeya.bench.gpu.rig import Rig
from kakeya.bench.gpu.runtime import generate_all, sessions
from kakeya.bench.gpu.shapes import SHAPES, Shape
from kakeya.bench.processes import LineProcess, answer_lines
from kakeya.errors import PeerFailed

WARM_UP_TOKENS = 8
WORKER = ("-m", "kakeya.bench.gpu.transformers_peer")
LIMIT_SECONDS = 60.0

# The library's own choice first. Which of the others it takes differs between its versions.
DEFAULT = "default"
ATTENTIONS = (DEFAULT, "paged|sdpa", "eager")

Prompts = Sequence[Sequence[int]]


class Transformers:
    """A Llama of the given shape, with the library's own choice of attention unless one is named.

    Methods return tokens a second, prompts included. They raise PeerFailed when not all tokens were made.
    """

    def __init__(self, shape: Shape, device: torch.device, attention: str = DEFAULT) -> None:
        transformers = import_module("transformers")
        transformers.utils.logging.set_verbosity_error()
        sizes = {name: shape.config[name] for name in shape.config.keys() - {"model_type", "rope_theta"}}
        config = transformers.LlamaConfig(**sizes | {"max_position_embeddings": 8192, "pad_token_id": 0})
        with device:
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        self._model: Any = model.eval().requires_grad_(False)
        if attention != DEFAULT:
            self._model.set_attn_implementation(attention)
        self._device = device
        self._settings: Callable[..., Any] = transformers.GenerationConfig

    def generate(self, prompts: Prompts, tokens: int) -> float:
        ids = torch.tensor(prompts, device=self._device)
        settings = self._greedy(tokens)
        began = time.perf_counter()
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = self._model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings
            ).tolist()
        return _speed(sum(map(len, output)) - ids.numel(), len(prompts) * tokens, began)

    def generate_batch(self, prompts: Prompts, tokens: int) -> float:
        """What it sets up for each call counts: a manager that it kept would stay sized for the requests of
        its first call, those of the warm-up."""
        began = time.perf_counter()
        output = self._model.generate_batch(
            inputs=[list(prompt) for prompt in prompts], generation_config=self._greedy(tokens)
        )
        made = sum(len(each.generated_tokens) for each in output.values())
        # The call returns even when a request failed.
        error = next((str(each.error) for each in output.values() if each.error), "")
        return _speed(made, len(prompts) * tokens, began, error)

    def _greedy(self, tokens: int) -> Any:
        return self._settings(do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0)


def _speed(made: int, wanted: int, began: float, why: str = "") -> float:
    """Half the work is not twice the speed."""
    if made != wanted:
        raise PeerFailed(f"transformers made {made} of {wanted} tokens{why and ': '}{why}")
    return made / (time.perf_counter() - began)


def our_speeds(rig: Rig, plan: GpuPlan, count: int) -> list[float]:
    """Tokens a second through the runtime, from the first call to the last token."""

    def speed(prompts: Prompts, tokens: int) -> float:
        with sessions(rig.runtime, prompts) as session_ids:
            return generate_all(rig.runtime, session_ids, tokens).whole_speed

    return _repeated(speed, rig.shape, plan, count)


def generate_speeds(shape: Shape, plan: GpuPlan, count: int, device: torch.device) -> list[float]:
    return _repeated(Transformers(shape, device).generate, shape, plan, count)


def _repeated(speed: Callable[[Prompts, int], float], shape: Shape, plan: GpuPlan, count: int) -> list[float]:
    prompts = shape.histories(count, plan.peer_prompt)
    speed(prompts, WARM_UP_TOKENS)
    return [speed(prompts, plan.peer_tokens) for _ in range(plan.peer_repeats)]


@dataclass(frozen=True)
class MeasuredBatch:
    """Tokens a second with the first attention that worked, and why those before it did not."""

    speed: float
    attention: str
    failed: Mapping[str, str]

    @property
    def method(self) -> str:
        return GENERATE_BATCH if self.attention == DEFAULT else f"{GENERATE_BATCH}, {self.attention}"


class _BatchProcess(LineProcess):
    name = GENERATE_BATCH


def measured_batch(
    shape: str,
    plan: GpuPlan,
    count: int,
    device: torch.device,
    *,
    worker: Sequence[str] = WORKER,
    limit_s: float = LIMIT_SECONDS,
) -> MeasuredBatch:
    """Measure it. Raises PeerFailed when it breaks, or has no answer when the limit is over."""
    request = {
        "shape": shape,
        "device": str(device),
        "sessions": count,
        "prompt": plan.peer_prompt,
        "tokens": plan.peer_tokens,
    }
    with _BatchProcess(worker, own_session=True) as process:
        return MeasuredBatch(**process.ask_within(limit_s, request))


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The MeasuredBatch for a request. Raises PeerFailed when no attention works."""
    failed: dict[str, str] = {}
    for attention in ATTENTIONS:
        _say(f"attention {attention}")
        try:
            return {"speed": _batch_speed(request, attention), "attention": attention, "failed": failed}
        except Exception as error:  # foreign code may raise anything, and another attention may still do
            failed[attention] = f"{type(error).__name__}: {error}"
            _say(failed[attention])
    raise PeerFailed("; ".join(f"attention {name}: {why}" for name, why in failed.items()))


def _batch_speed(request: Mapping[str, Any], attention: str) -> float:
    shape = SHAPES[request["shape"]]
    prompts = shape.histories(request["sessions"], request["prompt"])
    peer = Transformers(shape, torch.device(request["device"]), attention)
    peer.generate_batch(prompts, WARM_UP_TOKENS)
    return peer.generate_batch(prompts, request["tokens"])


def _say(what: str) -> None:
    """For the parent, which repeats the last of it when it has waited in vain."""
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    answer_lines(answer)
    # A thread of the library's may still run, and would be waited for.
    os._exit(0)

"""transformers beside us on the same device: the same shape with random weights, bf16, the same prompts.

`generate_batch` runs in its own process, which is killed when it takes too long: the call waits for a thread
of the library, without a limit. Run as a program, this module is that process. It answers one JSON request:
it calls `generate_batch` once to warm up and once more with the clock running.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from kakeya.bench.gpu.plan import GpuPlan
from kakeya.bench.gpu.results import GENERATE_BATCH, Absence, Part, Peer
from kakeya.bench.gpu.shapes import SHAPES, Shape
from kakeya.bench.processes import LineProcess, answer_lines
from kakeya.bench.stats import Samples
from kakeya.errors import PeerFailed

WARM_UP_TOKENS = 8
WORKER = ("-m", "kakeya.bench.gpu.transformers_peer")
LIMIT_SECONDS = 60.0

# The library's own choice first. Which of the others it accepts differs between its versions.
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
        """What it sets up for each call counts: a manager that is kept stays sized for its first call."""
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


def peer_row(
    shape: Shape, plan: GpuPlan, count: int, method: str, speed: Callable[[list[list[int]], int], float]
) -> Peer:
    """Speeds by one method, after a call to warm up."""
    prompts = shape.histories(count, plan.peer_prompt)
    speed(prompts, WARM_UP_TOKENS)
    speeds = Samples.of(speed(prompts, plan.peer_tokens) for _ in range(plan.peer_repeats))
    return Peer(shape.name, count, method, speeds)


class _BatchProcess(LineProcess):
    name = GENERATE_BATCH


def batch_rows(
    shape: str,
    plan: GpuPlan,
    count: int,
    device: torch.device,
    work: str,
    *,
    worker: Sequence[str] = WORKER,
    limit_s: float = LIMIT_SECONDS,
) -> Iterator[Peer | Absence]:
    """`generate_batch` with the first attention that works, and why those before it did not."""
    asked = {"sessions": count, "prompt": plan.peer_prompt, "tokens": plan.peer_tokens}
    try:
        with _BatchProcess(worker, own_session=True) as process:
            reply = process.ask_within(limit_s, {"shape": shape, "device": str(device), **asked})
    except PeerFailed as error:
        yield Absence(Part.TRANSFORMERS, work, str(error))
        return
    attention = reply["attention"]
    method = GENERATE_BATCH if attention == DEFAULT else f"{GENERATE_BATCH}, {attention}"
    yield Peer(shape, count, method, Samples((reply["speed"],)))
    for name, why in reply["failed"].items():
        yield Absence(Part.TRANSFORMERS, f"{work}, attention {name}", why)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The speed of a batch, with the attention that worked. Raises PeerFailed when none works."""
    shape, device = request["shape"], torch.device(request["device"])
    failed: dict[str, str] = {}
    for attention in ATTENTIONS:
        _say(f"attention {attention}")
        try:
            prompts = SHAPES[shape].histories(request["sessions"], request["prompt"])
            peer = Transformers(SHAPES[shape], device, attention)
            peer.generate_batch(prompts, WARM_UP_TOKENS)
            speed = peer.generate_batch(prompts, request["tokens"])
            return {"speed": speed, "attention": attention, "failed": failed}
        except Exception as error:  # foreign code may raise anything, and another attention may still work
            failed[attention] = f"{type(error).__name__}: {error}"
            _say(failed[attention])
    raise PeerFailed("; ".join(f"attention {name}: {why}" for name, why in failed.items()))


def _say(what: str) -> None:
    """For the parent, which repeats the last line when there is no answer."""
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    answer_lines(answer)
    # A thread of the library may still run, and Python would wait for it.
    os._exit(0)

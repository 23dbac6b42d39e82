"""transformers beside us on the same device: the same shape with random weights, bf16, the same prompts."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from kakeya.bench.gpu_plan import GpuPlan
from kakeya.bench.gpu_rig import Rig
from kakeya.bench.gpu_runtime import generate_all, histories, sessions
from kakeya.bench.gpu_shapes import Shape
from kakeya.errors import PeerFailed

WARM_UP_TOKENS = 8

Prompts = Sequence[Sequence[int]]


class Transformers:
    """A Llama of the given shape, with the library's own choice of attention unless one is named.

    Methods return tokens a second, prompts included. They raise PeerFailed when not all tokens were made.
    """

    def __init__(self, shape: Shape, device: torch.device, attention: str | None = None) -> None:
        transformers = import_module("transformers")
        transformers.utils.logging.set_verbosity_error()
        sizes = shape.model
        config = transformers.LlamaConfig(
            vocab_size=sizes.vocab_size,
            hidden_size=sizes.hidden_size,
            intermediate_size=sizes.intermediate_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            rms_norm_eps=sizes.norm_eps,
            tie_word_embeddings=sizes.tied_head,
            max_position_embeddings=8192,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
        with device:
            model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        self._model: Any = model.eval().requires_grad_(False)
        if attention is not None:
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
        return _speed(made, len(prompts) * tokens, began, _first_error(output))

    def _greedy(self, tokens: int) -> Any:
        return self._settings(do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0)


def _speed(made: int, wanted: int, began: float, why: str = "") -> float:
    """Half the work is not twice the speed."""
    if made != wanted:
        raise PeerFailed(f"transformers made {made} of {wanted} tokens{why and ': '}{why}")
    return made / (time.perf_counter() - began)


def _first_error(output: Mapping[str, Any]) -> str:
    """What the library says of a request that failed: its call returns all the same."""
    return next((str(each.error) for each in output.values() if each.error), "")


def our_speeds(rig: Rig, plan: GpuPlan, count: int) -> list[float]:
    """Tokens a second through the runtime, from the first call to the last token."""
    return _repeated(lambda prompts, tokens: _our_speed(rig, prompts, tokens), rig.shape, plan, count)


def generate_speeds(shape: Shape, plan: GpuPlan, count: int, device: torch.device) -> list[float]:
    return _repeated(Transformers(shape, device).generate, shape, plan, count)


def _repeated(
    method: Callable[[Prompts, int], float], shape: Shape, plan: GpuPlan, count: int
) -> list[float]:
    prompts = histories(shape, count, plan.peer_prompt)
    method(prompts, WARM_UP_TOKENS)
    return [method(prompts, plan.peer_tokens) for _ in range(plan.peer_repeats)]


def _our_speed(rig: Rig, prompts: Prompts, tokens: int) -> float:
    with sessions(rig.runtime, prompts) as session_ids:
        tally = generate_all(rig.runtime, session_ids, tokens)
    return tally.tokens / tally.seconds

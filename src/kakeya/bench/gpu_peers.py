"""transformers beside us on the same device: the same shape with random weights, bf16, the same prompts."""

import time
from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from kakeya.bench.gpu_plan import GpuPlan
from kakeya.bench.gpu_results import Part, absence, peer_row
from kakeya.bench.gpu_rig import Rig
from kakeya.bench.gpu_runtime import generate_all, histories, sessions
from kakeya.bench.gpu_shapes import Shape
from kakeya.errors import PeerFailed

GENERATE, GENERATE_BATCH = "generate", "generate_batch"
_WARM_UP_TOKENS = 8
_KEEP = "persistent_manager"

Prompts = Sequence[Sequence[int]]
Row = dict[str, Any]


class Transformers:
    """A Llama of the given shape. Methods return tokens a second, prompts included."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
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
        self._device = device
        self._settings: Callable[..., Any] = transformers.GenerationConfig

    @property
    def methods(self) -> dict[str, Callable[[Prompts, int], float]]:
        """The ways it can generate here."""
        ways: dict[str, Callable[[Prompts, int], float]] = {GENERATE: self.generate}
        if self._device.type == "cuda" and hasattr(self._model, "generate_batch"):
            ways[GENERATE_BATCH] = self.generate_batch
        return ways

    def generate(self, prompts: Prompts, tokens: int) -> float:
        ids = torch.tensor(prompts, device=self._device)
        settings = self._greedy(tokens)
        began = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=settings
            ).tolist()
        return _speed(sum(map(len, output)) - ids.numel(), len(prompts) * tokens, began)

    def generate_batch(self, prompts: Prompts, tokens: int) -> float:
        """What it sets up at first is kept where it can be, so that it does not count again."""
        method = self._model.generate_batch
        kept = {_KEEP: True} if _KEEP in signature(method).parameters else {}
        inputs, settings = [list(prompt) for prompt in prompts], self._greedy(tokens)
        began = time.perf_counter()
        output = method(inputs=inputs, generation_config=settings, **kept)
        made = sum(len(each.generated_tokens) for each in output.values())
        return _speed(made, len(prompts) * tokens, began)

    def close(self) -> None:
        """Let go of what `generate_batch` keeps."""
        destroy = getattr(self._model, "destroy_cached_continuous_batching_manager", None)
        if destroy is not None:
            destroy()

    def _greedy(self, tokens: int) -> Any:
        return self._settings(do_sample=False, max_new_tokens=tokens, eos_token_id=None, pad_token_id=0)


def _speed(made: int, wanted: int, began: float) -> float:
    """Raises PeerFailed when not all tokens were made: half the work is not twice the speed."""
    if made != wanted:
        raise PeerFailed(f"transformers made {made} of {wanted} tokens")
    return made / (time.perf_counter() - began)


def measure_peers(rig: Rig, plan: GpuPlan, device: torch.device) -> tuple[list[Row], list[dict[str, str]]]:
    """A row for each number of sessions and each of their ways, and the ways that failed."""
    rows: list[Row] = []
    failed: list[dict[str, str]] = []
    peer = Transformers(rig.shape, device)
    try:
        for count in plan.peer_sessions:
            prompts = histories(rig, count, plan.peer_prompt)
            for name, method in peer.methods.items():
                try:
                    ours, theirs = _in_turns(rig, prompts, method, plan)
                    rows.append(peer_row(rig.shape.name, count, name, ours, theirs))
                except Exception as error:  # foreign code may raise anything, and another way may still do
                    failed.append(absence(Part.TRANSFORMERS, f"{name}, {count} sessions", repr(error)))
    finally:
        peer.close()
    return rows, failed


def _in_turns(
    rig: Rig, prompts: Prompts, method: Callable[[Prompts, int], float], plan: GpuPlan
) -> tuple[list[float], list[float]]:
    ours, theirs = [], []
    our_speed(rig, prompts, _WARM_UP_TOKENS)
    method(prompts, _WARM_UP_TOKENS)
    for _ in range(plan.peer_repeats):
        ours.append(our_speed(rig, prompts, plan.peer_tokens))
        theirs.append(method(prompts, plan.peer_tokens))
    return ours, theirs


def our_speed(rig: Rig, prompts: Prompts, tokens: int) -> float:
    """The same through the runtime: tokens a second, from the first call to the last token."""
    with sessions(rig.runtime, prompts) as session_ids:
        tally = generate_all(rig.runtime, session_ids, tokens)
    return tally.tokens / tally.seconds

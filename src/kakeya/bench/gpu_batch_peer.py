"""`generate_batch` of transformers in a process of its own, which is killed when it takes too long.

The call waits for a thread of the library's, with no limit of its own. Run as a program this answers one JSON
request: one call to warm up, then one that is timed.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch

from kakeya.bench.gpu_peers import WARM_UP_TOKENS, Transformers
from kakeya.bench.gpu_plan import GpuPlan
from kakeya.bench.gpu_results import GENERATE_BATCH
from kakeya.bench.gpu_runtime import histories
from kakeya.bench.gpu_shapes import SHAPES
from kakeya.bench.line_process import LineProcess
from kakeya.errors import PeerFailed

WORKER = ("-m", "kakeya.bench.gpu_batch_peer")
LIMIT_SECONDS = 60.0

# The library's own choice first. Which of the others it takes differs between its versions.
DEFAULT = "default"
ATTENTIONS = (DEFAULT, "paged|sdpa", "eager")


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

    def __init__(self, worker: Sequence[str]) -> None:
        super().__init__(worker, own_session=True)

    def measure(self, request: Mapping[str, Any], limit_s: float) -> MeasuredBatch:
        reply = self._ask_within(limit_s, request)
        if "error" in reply:
            raise PeerFailed(reply["error"])
        return MeasuredBatch(**reply)


def measured(
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
    with _BatchProcess(worker) as process:
        return process.measure(request, limit_s)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The reply to a request: a MeasuredBatch, or an error."""
    failed: dict[str, str] = {}
    for attention in ATTENTIONS:
        _say(f"attention {attention}")
        try:
            return {"speed": _speed(request, attention), "attention": attention, "failed": failed}
        except Exception as error:  # foreign code may raise anything, and another attention may still do
            failed[attention] = f"{type(error).__name__}: {error}"
            _say(failed[attention])
    return {"error": "; ".join(f"attention {name}: {why}" for name, why in failed.items())}


def _speed(request: Mapping[str, Any], attention: str) -> float:
    shape = SHAPES[request["shape"]]
    prompts = histories(shape, request["sessions"], request["prompt"])
    peer = Transformers(shape, torch.device(request["device"]), None if attention == DEFAULT else attention)
    peer.generate_batch(prompts, WARM_UP_TOKENS)
    return peer.generate_batch(prompts, request["tokens"])


def _say(what: str) -> None:
    """For the parent, which tells the last of it when it has waited in vain."""
    sys.stderr.write(f"{what}\n")
    sys.stderr.flush()


def serve(requests: TextIO, replies: TextIO) -> None:
    reply = answer(json.loads(requests.readline()))
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    # Stdout is for the reply: what the library prints goes where errors go.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(sys.stdin, replies)
    # A thread of the library's may still run, and would be waited for.
    os._exit(0)

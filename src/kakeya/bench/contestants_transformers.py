"""transformers as a contestant, in a process of its own: `generate` over the whole history at every turn.

Run as a program it answers one JSON request a line: `open` loads the model, `say` continues messages.
"""

import json
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from kakeya.bench.contestants import Message, Stopwatch
from kakeya.bench.machine import installed_version
from kakeya.bench.peers import PeerProcess
from kakeya.bench.turns_results import TRANSFORMERS, Answered
from kakeya.errors import ConfigError, PeerFailed

WORKER = ("-m", "kakeya.bench.contestants_transformers")


def require_transformers(model_path: str) -> None:
    """Refuse a comparison that cannot be made. Raises ConfigError naming what is missing."""
    place = Path(model_path)
    # transformers reads a GGUF file with accelerate's help, and says so only when it opens one.
    for library in ("transformers", "accelerate") if place.suffix == ".gguf" else ("transformers",):
        if find_spec(library) is None:
            raise ConfigError(f"{library} is not installed: pip install 'kakeya[peers]'")
    if not place.exists():
        raise ConfigError(f"transformers needs the model's file or directory, got {model_path}")


class TransformersContestant(PeerProcess):
    """The parent's end, and a contestant. Nothing is streamed, so there is no time to a first token."""

    name = TRANSFORMERS

    def __init__(
        self, model_path: str, threads: int, max_tokens: int, worker: Sequence[str] = WORKER
    ) -> None:
        super().__init__(model_path, threads, (), worker)
        self._max_tokens = max_tokens
        self._messages: list[Message] = []

    def say(self, text: str) -> Answered:
        asked = [*self._messages, {"role": "user", "content": text}]
        watch = Stopwatch()
        reply = self._ask({"do": "say", "messages": asked, "max_tokens": self._max_tokens})
        answered = Answered(
            watch.now_s, None, reply["prompt_tokens"], reply["answer_tokens"], cached_tokens=0
        )
        self._messages = [*asked, {"role": "assistant", "content": reply["text"]}]
        return answered

    def forget(self) -> None:
        self._messages = []


class _Model:
    """A loaded model. Activations in bfloat16, which is the quicker one where processors know it."""

    def __init__(self, path: str, threads: int) -> None:
        torch, transformers = import_module("torch"), import_module("transformers")
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        place = Path(path)
        source = {"gguf_file": place.name} if place.is_file() else {}
        directory = str(place.parent if place.is_file() else place)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **source)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, **source
        ).eval()
        self._inference_mode = torch.inference_mode
        # The file may name sampling settings of its own; this is greedy, and knows no second limit.
        self._settings = transformers.GenerationConfig(
            do_sample=False,
            eos_token_id=self._model.generation_config.eos_token_id,
            pad_token_id=self._tokenizer.eos_token_id,
        )

    def say(self, messages: Sequence[Message], max_tokens: int) -> dict[str, Any]:
        prompt = self._tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        count = prompt["input_ids"].shape[1]
        with self._inference_mode():
            ids = self._model.generate(**prompt, generation_config=self._settings, max_new_tokens=max_tokens)
        answer = ids[0, count:]
        text = self._tokenizer.decode(answer, skip_special_tokens=True)
        return {"text": text, "prompt_tokens": count, "answer_tokens": len(answer)}


def serve(requests: TextIO, replies: TextIO) -> None:
    """Answer requests until they end. The first one must be `open`."""
    model: _Model | None = None
    for line in requests:
        request = json.loads(line)
        try:
            if request["do"] == "open":
                model = _Model(request["path"], request["threads"])
                reply = {"library": f"transformers {installed_version('transformers')}", "dtype": "bfloat16"}
            else:
                assert model is not None, "the first request must be open"
                reply = model.say(request["messages"], request["max_tokens"])
        except (PeerFailed, OSError, ValueError, RuntimeError) as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout)

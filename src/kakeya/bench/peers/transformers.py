"""transformers as a way to talk, in a process of its own: `generate` over the whole history at every turn.

Run as a program this is that process: `open` loads the model, `say` continues messages.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kakeya.bench.machine import installed_version
from kakeya.bench.processes import LineProcess, answer_lines
from kakeya.bench.talk import TRANSFORMERS, Turn
from kakeya.bench.ways import Message
from kakeya.errors import ConfigError

WORKER = ("-m", "kakeya.bench.peers.transformers")


def require_transformers(model_path: str) -> None:
    """Refuse a comparison that cannot be made. Raises ConfigError naming what is missing."""
    place = Path(model_path)
    # transformers reads a GGUF file with accelerate's help, and says so only when it opens one.
    for library in ("transformers", "accelerate") if place.suffix == ".gguf" else ("transformers",):
        if find_spec(library) is None:
            raise ConfigError(f"{library} is not installed: pip install 'kakeya[peers]'")
    if not place.exists():
        raise ConfigError(f"transformers needs the model's file or directory, got {model_path}")


class TransformersWay(LineProcess):
    """The parent's end. Nothing is streamed, so there is no time to a first token."""

    name = TRANSFORMERS

    def __init__(
        self, model_path: str, threads: int, max_tokens: int, worker: Sequence[str] = WORKER
    ) -> None:
        super().__init__(worker)
        self._max_tokens = max_tokens
        self._history: list[Message] = []
        self.facts: dict[str, Any] = self.open({"do": "open", "path": model_path, "threads": threads})

    async def say(self, text: str) -> Turn:
        asked = [*self._history, {"role": "user", "content": text}]
        began = time.perf_counter()
        request = {"do": "say", "messages": asked, "max_tokens": self._max_tokens}
        # A thread waits, so that signals are heard meanwhile.
        reply = await asyncio.to_thread(self.ask, request)
        self._history = [*asked, {"role": "assistant", "content": reply.pop("text")}]
        return Turn(latency_s=time.perf_counter() - began, cached_tokens=0, **reply)

    async def forget(self) -> None:
        self._history = []


class _Worker:
    """A model, once `open` was asked for. Activations are bfloat16, the quicker ones on many processors."""

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["do"] == "open":
            self._open(Path(request["path"]), request["threads"])
            return {"library": f"transformers {installed_version('transformers')}", "dtype": "bfloat16"}
        return self._say(request["messages"], request["max_tokens"])

    def _open(self, place: Path, threads: int) -> None:
        torch, transformers = import_module("torch"), import_module("transformers")
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        source = {"gguf_file": place.name} if place.is_file() else {}
        directory = str(place.parent if place.is_file() else place)
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **source)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.bfloat16, **source
        ).eval()
        # The file may name sampling settings of its own; this is greedy, and knows no second limit.
        self._settings = transformers.GenerationConfig(
            do_sample=False,
            eos_token_id=self._model.generation_config.eos_token_id,
            pad_token_id=self._tokenizer.eos_token_id,
        )

    def _say(self, messages: Sequence[Message], max_tokens: int) -> dict[str, Any]:
        prompt = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        count = prompt["input_ids"].shape[1]
        with import_module("torch").inference_mode():
            ids = self._model.generate(**prompt, generation_config=self._settings, max_new_tokens=max_tokens)
        answer = ids[0, count:]
        text = self._tokenizer.decode(answer, skip_special_tokens=True)
        return {"text": text, "prompt_tokens": count, "answer_tokens": len(answer)}


if __name__ == "__main__":
    answer_lines(_Worker().answer)

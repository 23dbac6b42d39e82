"""llama.cpp's side of `bench engine --peers` and `bench quality --part peer`, in a process of its own.

It works as llama.cpp's own batched benchmark does: prompts in one batch, one cache stream per
sequence, decode batches of one token a sequence, no sampling. Flash attention is tried on and off
for every case and the quicker one is kept, so the peer is seen at its best.

Run as a program this is that process; imported it is the parent's end of it.
"""

import ctypes
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kakeya.bench.cases import LEAD_IN, Case
from kakeya.bench.processes import LineProcess, answer_lines, resident_bytes
from kakeya.bench.text import stretch
from kakeya.errors import ConfigError, PeerFailed

WORKER = ("-m", "kakeya.bench.peers.llama")
BATCH = 2048
# With a large vocabulary the logits of more rows at once would take much memory.
SCORED_AT_ONCE = 128
# Filling a long history takes the peer minutes. Beyond this one, the setting that won there is used.
LONGEST_TRIED_HISTORY = 4096
TRIES = 3


def require_llama(model_path: str | None = None, *, asked_by: str = "--peers") -> None:
    """Refuse a comparison that cannot be made. Raises ConfigError naming what is missing and who asked."""
    if find_spec("llama_cpp") is None:
        raise ConfigError(f"{asked_by} needs llama.cpp; install the extra: pip install 'kakeya[peers]'")
    if model_path is not None and Path(model_path).suffix != ".gguf":
        raise ConfigError(
            f"{asked_by} needs a model in one .gguf file, which llama.cpp can read, got {model_path}"
        )


class LlamaProcess(LineProcess):
    """A `Side` that runs elsewhere. A context manager; leaving it ends the process.

    `facts` describes the library, `flash_attention` what was chosen for each case, `our_cpu_share` is the
    largest share of one core that *this* process used while the peer was being timed, and `resident_bytes`
    the most memory that the peer was seen to hold. Raises PeerFailed when it breaks.
    """

    name = "llama.cpp"

    def __init__(
        self, model_path: str, threads: int, text: Sequence[int], worker: Sequence[str] = WORKER
    ) -> None:
        super().__init__(worker)
        self.flash_attention: dict[str, bool] = {}
        self.our_cpu_share = 0.0
        self.resident_bytes: int | None = None
        opening = {"do": "open", "path": model_path, "threads": threads, "text": list(text)}
        self.facts: dict[str, str] = self.open(opening)

    def prepare(self, case: Case) -> None:
        self.flash_attention[case.label] = self.ask({"do": "prepare", "case": asdict(case)})

    def measure(self, case: Case) -> float:
        cpu, wall = time.process_time(), time.perf_counter()
        speed: float = self.ask({"do": "measure", "case": asdict(case)})
        share = (time.process_time() - cpu) / (time.perf_counter() - wall)
        self.our_cpu_share = max(self.our_cpu_share, share)
        self.resident_bytes = max(self.resident_bytes or 0, resident_bytes(self.pid) or 0)
        return speed

    def surprises(self, token_ids: Sequence[int]) -> list[float]:
        """How much each token but the first surprises the peer's model, in nats, in a context of its own."""
        found: list[float] = self.ask({"do": "score", "token_ids": list(token_ids)})
        return found

    def release(self) -> None:
        if self.running:
            self.ask({"do": "release"})


class _Context:
    """A llama.cpp context made for one case, with its history filled in."""

    def __init__(self, peer: "LlamaPeer", case: Case, *, flash: bool) -> None:
        self.case, self.flash = case, flash
        self._lib, self._text, self._batch = peer.lib, peer.text, peer.batch
        self._vocabulary = peer.vocabulary
        self._handle = self._lib.llama_init_from_model(peer.model, _context_params(peer, case, flash=flash))
        if not self._handle:
            raise PeerFailed(f"llama.cpp could not make a context for {case.label}")
        self._memory = self._lib.llama_get_memory(self._handle)
        if not case.is_prompt:
            self._fill(case)

    def measure(self) -> float:
        return self._prompt(self.case) if self.case.is_prompt else self._decode(self.case)

    def surprises(self, tokens: Sequence[int]) -> list[float]:
        """How much each token but the first surprises the model, in nats."""
        found: list[float] = []
        for start in range(0, len(tokens), SCORED_AT_ONCE):
            end = start + SCORED_AT_ONCE
            block = tokens[start:end]
            self._run([(token, position, 0, True) for position, token in enumerate(block, start)])
            found += surprises_of(self._logits(len(block)), tokens[start + 1 : end + 1])
        return found

    def free(self) -> None:
        self._lib.llama_free(self._handle)

    def _fill(self, case: Case) -> None:
        self._feed(stretch(self._text, 0, case.history))
        for sequence in range(1, case.sessions):
            self._lib.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def _prompt(self, case: Case) -> float:
        tokens = stretch(self._text, 0, case.tokens)
        self._lib.llama_memory_clear(self._memory, True)
        began = time.perf_counter()
        self._feed(tokens)
        return case.tokens / (time.perf_counter() - began)

    def _decode(self, case: Case) -> float:
        following = stretch(self._text, case.history, LEAD_IN + case.steps)
        began = 0.0
        for step, token in enumerate(following):
            if step == LEAD_IN:
                began = time.perf_counter()
            self._run([(token, case.history + step, sequence, True) for sequence in range(case.sessions)])
        seconds = time.perf_counter() - began
        for sequence in range(case.sessions):
            self._lib.llama_memory_seq_rm(self._memory, sequence, case.history, -1)
        return case.sessions * case.steps / seconds

    def _feed(self, tokens: Sequence[int]) -> None:
        """Compute `tokens` as sequence 0, asking for the logits of the last one only."""
        last = len(tokens) - 1
        rows = [(token, position, 0, position == last) for position, token in enumerate(tokens)]
        for start in range(0, len(rows), BATCH):
            self._run(rows[start : start + BATCH])

    def _logits(self, rows: int) -> NDArray[np.float32]:
        """Those of the last batch [rows, vocab]; the library's own memory, until its next batch."""
        return np.ctypeslib.as_array(self._lib.llama_get_logits(self._handle), shape=(rows, self._vocabulary))

    def _run(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """One `llama_decode` over rows of (token, position, sequence, wants logits)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wants_logits) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = wants_logits
        status = self._lib.llama_decode(self._handle, batch)
        if status != 0:
            raise PeerFailed(f"llama_decode returned {status} in {self.case.label}")
        self._lib.llama_synchronize(self._handle)


class LlamaPeer:
    """A model opened by llama.cpp, measured as a `Side`.

    Raises ConfigError when llama-cpp-python is absent and PeerFailed when llama.cpp refuses something.
    """

    name = "llama.cpp"

    def __init__(self, path: str, threads: int, text: Sequence[int]) -> None:
        self.lib = _library()
        self.text, self.threads = text, threads
        # The callback must live as long as the library may call it.
        self._silence = self.lib.llama_log_callback(lambda level, message, data: None)
        self.lib.llama_log_set(self._silence, ctypes.c_void_p(0))
        self.lib.llama_backend_init()
        params = self.lib.llama_model_default_params()
        params.n_gpu_layers = 0  # the same device as ours, whatever the library was built for
        self.model = self.lib.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise PeerFailed(f"llama.cpp could not open {path}")
        self.vocabulary: int = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))
        self.batch = self.lib.llama_batch_init(BATCH, 0, 1)
        self._contexts: dict[Case, _Context] = {}
        self._flash_at_longest = True

    def facts(self) -> dict[str, str]:
        """Which library this is and what it was built for."""
        system = self.lib.llama_print_system_info().decode().strip()
        return {"library": f"llama-cpp-python {self.lib.__version__}", "system": system}

    def flash(self, case: Case) -> bool:
        """Whether the prepared case runs with flash attention."""
        return self._contexts[case].flash

    def prepare(self, case: Case) -> None:
        long = case.history > LONGEST_TRIED_HISTORY
        settings = [self._flash_at_longest] if long else [True, False]
        best = self._quickest(case, settings)
        self._contexts[case] = best
        if not case.is_prompt:
            self._flash_at_longest = best.flash

    def measure(self, case: Case) -> float:
        return self._contexts[case].measure()

    def surprises(self, tokens: Sequence[int]) -> list[float]:
        """In a context of its own, without flash attention, which sums in 16 bits."""
        context = _Context(self, Case(tokens=len(tokens)), flash=False)
        try:
            return context.surprises(tokens)
        finally:
            context.free()

    def release(self) -> None:
        for context in self._contexts.values():
            context.free()
        self._contexts.clear()

    def close(self) -> None:
        self.release()
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_model_free(self.model)

    def _quickest(self, case: Case, settings: Sequence[bool]) -> _Context:
        """The quicker of the contexts, each judged by the best of several tries taken in turn."""
        contexts = [_Context(self, case, flash=flash) for flash in settings]
        tries = [[context.measure() for context in contexts] for _ in range(TRIES)]
        best = [max(speeds) for speeds in zip(*tries, strict=True)]
        chosen = contexts.pop(best.index(max(best)))
        for slower in contexts:
            slower.free()
        return chosen


def surprises_of(logits: NDArray[np.float32], following: Sequence[int]) -> list[float]:
    """How much each following token surprises, in nats; rows beyond the last of them are not looked at."""
    rows = logits[: len(following)].astype(np.float64)
    highest = rows.max(axis=1, keepdims=True)
    totals = highest[:, 0] + np.log(np.exp(rows - highest).sum(axis=1))
    chosen = rows[np.arange(len(following)), list(following)]
    found: list[float] = (totals - chosen).tolist()
    return found


def _library() -> Any:
    try:
        return import_module("llama_cpp")
    except ImportError as error:
        raise ConfigError(
            f"llama.cpp is not installed ({error}); install the extra: pip install 'kakeya[peers]'"
        ) from error


def _context_params(peer: LlamaPeer, case: Case, *, flash: bool) -> Any:
    params = peer.lib.llama_context_default_params()
    params.n_ctx = case.sessions * tokens_per_sequence(case)
    params.n_batch = BATCH
    params.n_seq_max = case.sessions
    params.n_threads = params.n_threads_batch = peer.threads
    params.flash_attn_type = (
        peer.lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else peer.lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.offload_kqv = params.op_offload = False
    # Sequences of their own instead of one shared cache: quicker here, and its own benchmark's default.
    params.kv_unified = False
    return params


def tokens_per_sequence(case: Case) -> int:
    """Cache cells a sequence needs, in the multiples of 256 that llama.cpp works in."""
    needed = case.tokens if case.is_prompt else case.history + LEAD_IN + case.steps
    return -(-needed // 256) * 256


class _Worker:
    """Answers the parent: `open` comes first."""

    def __init__(self) -> None:
        self.peer: LlamaPeer | None = None

    def answer(self, request: Mapping[str, Any]) -> Any:
        if request["do"] == "open":
            self.peer = LlamaPeer(request["path"], request["threads"], request["text"])
            return self.peer.facts()
        assert self.peer is not None, "the first request must be open"
        if request["do"] == "release":
            return self.peer.release()
        if request["do"] == "score":
            return self.peer.surprises(request["token_ids"])
        case = Case(**request["case"])
        if request["do"] == "prepare":
            self.peer.prepare(case)
            return self.peer.flash(case)
        return self.peer.measure(case)


if __name__ == "__main__":
    worker = _Worker()
    answer_lines(worker.answer)
    if worker.peer is not None:
        worker.peer.close()

"""llama.cpp's side of `bench engine --peers` and `bench quality --part peer`, in a process of its own.

It works as llama.cpp's own batched benchmark does: prompts in one batch, one cache stream per
sequence, decode batches of one token a sequence, no sampling. Flash attention is tried on and off
for every case and the quicker one is kept, so the peer is seen at its best.

Run as a program this is that process; imported it is the parent's end of it.
"""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kakeya.bench.cases import LEAD_IN, Case
from kakeya.bench.processes import LineProcess, answer_lines
from kakeya.bench.text import stretch
from kakeya.bench.usage import resident_bytes
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


@dataclass(frozen=True)
class Peer:
    """The library, and how it ran: flash attention by case, and the most memory it was seen to hold.

    `our_cpu_share` is the largest share of one core that *this* process used while the peer was timed.
    """

    library: str
    system: str = ""
    flash_attention: dict[str, bool] = field(default_factory=dict)
    our_cpu_share: float = 0.0
    resident_bytes: int | None = None


class LlamaProcess(LineProcess):
    """A `Side` that runs elsewhere. A context manager; leaving it ends the process.

    `peer` is what is known of it so far. Raises PeerFailed when it breaks.
    """

    name = "llama.cpp"

    def __init__(
        self, model_path: str, threads: int, text: Sequence[int], worker: Sequence[str] = WORKER
    ) -> None:
        super().__init__(worker)
        opening = {"do": "open", "path": model_path, "threads": threads, "text": list(text)}
        self.peer = Peer(**self.open(opening))

    def prepare(self, case: Case) -> None:
        flash = self.ask({"do": "prepare", "case": asdict(case)})
        tried = {**self.peer.flash_attention, case.label(): flash}
        self.peer = replace(self.peer, flash_attention=tried)

    def measure(self, case: Case) -> float:
        cpu, wall = time.process_time(), time.perf_counter()
        speed: float = self.ask({"do": "measure", "case": asdict(case)})
        share = (time.process_time() - cpu) / (time.perf_counter() - wall)
        self.peer = replace(
            self.peer,
            our_cpu_share=max(self.peer.our_cpu_share, share),
            resident_bytes=max(self.peer.resident_bytes or 0, resident_bytes(self.pid) or 0),
        )
        return speed

    def surprises(self, token_ids: Sequence[int]) -> list[float]:
        """How much each token but the first surprises the peer's model, in nats, in a context of its own."""
        found: list[float] = self.ask({"do": "surprises", "token_ids": list(token_ids)})
        return found

    def release(self) -> None:
        if self.running:
            self.ask({"do": "release"})


class LlamaPeer:
    """A model opened by llama.cpp. Raises PeerFailed when llama.cpp refuses something."""

    def __init__(self, path: str, threads: int, text: Sequence[int]) -> None:
        self.lib: Any = import_module("llama_cpp")
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

    def prepare(self, case: Case) -> bool:
        """Make the case's context, the quicker one; whether it has flash attention."""
        long = case.history > LONGEST_TRIED_HISTORY
        best = self._quickest(case, [self._flash_at_longest] if long else [True, False])
        self._contexts[case] = best
        if not case.tokens:
            self._flash_at_longest = best.flash
        return best.flash

    def _quickest(self, case: Case, settings: Sequence[bool]) -> "_Context":
        """Each is judged by the best of several tries taken in turn."""
        contexts = [_Context(self, case, flash=flash) for flash in settings]
        tries = [[context.measure() for context in contexts] for _ in range(TRIES)]
        best = [max(speeds) for speeds in zip(*tries, strict=True)]
        chosen = contexts.pop(best.index(max(best)))
        for slower in contexts:
            slower.free()
        return chosen

    def measure(self, case: Case) -> float:
        return self._contexts[case].measure()

    def surprises(self, token_ids: Sequence[int]) -> list[float]:
        """In a context of its own, without flash attention, which sums in 16 bits."""
        context = _Context(self, Case(len(token_ids)), flash=False)
        try:
            return context.surprises(token_ids)
        finally:
            context.free()

    def release(self) -> None:
        for context in self._contexts.values():
            context.free()
        self._contexts.clear()


class _Context:
    """A llama.cpp context made for one case, with its history filled in."""

    def __init__(self, peer: LlamaPeer, case: Case, *, flash: bool) -> None:
        self.case, self.flash = case, flash
        self._peer, self._lib = peer, peer.lib
        self._handle = self._lib.llama_init_from_model(peer.model, self._params())
        if not self._handle:
            raise PeerFailed(f"llama.cpp could not make a context for {case.label()}")
        self._memory = self._lib.llama_get_memory(self._handle)
        if not case.tokens:
            self._feed(stretch(peer.text, 0, case.history))
            for sequence in range(1, case.sessions):
                self._lib.llama_memory_seq_cp(self._memory, 0, sequence, -1, -1)

    def _params(self) -> Any:
        params, enabled = self._lib.llama_context_default_params(), self._lib.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.n_ctx = self.case.sessions * tokens_per_sequence(self.case)
        params.n_batch = BATCH
        params.n_seq_max = self.case.sessions
        params.n_threads = params.n_threads_batch = self._peer.threads
        params.flash_attn_type = enabled if self.flash else self._lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.offload_kqv = params.op_offload = False
        # Sequences of their own instead of one shared cache: quicker here, and its own benchmark's default.
        params.kv_unified = False
        return params

    def measure(self) -> float:
        return self._prompt() if self.case.tokens else self._decode()

    def _prompt(self) -> float:
        tokens = stretch(self._peer.text, 0, self.case.tokens)
        self._lib.llama_memory_clear(self._memory, True)
        began = time.perf_counter()
        self._feed(tokens)
        return len(tokens) / (time.perf_counter() - began)

    def _decode(self) -> float:
        sequences, history, steps = range(self.case.sessions), self.case.history, self.case.steps
        began = 0.0
        for step, token in enumerate(stretch(self._peer.text, history, LEAD_IN + steps)):
            if step == LEAD_IN:
                began = time.perf_counter()
            self._run([(token, history + step, sequence, True) for sequence in sequences])
        seconds = time.perf_counter() - began
        for sequence in sequences:
            self._lib.llama_memory_seq_rm(self._memory, sequence, history, -1)
        return len(sequences) * steps / seconds

    def surprises(self, token_ids: Sequence[int]) -> list[float]:
        """How much each token but the first surprises the model, in nats."""
        found: list[float] = []
        for start in range(0, len(token_ids), SCORED_AT_ONCE):
            end = start + SCORED_AT_ONCE
            block = token_ids[start:end]
            self._run([(token, position, 0, True) for position, token in enumerate(block, start)])
            # The library's own memory, until its next batch.
            logits = self._lib.llama_get_logits(self._handle)
            shape = (len(block), self._peer.vocabulary)
            found += surprises_of(np.ctypeslib.as_array(logits, shape=shape), token_ids[start + 1 : end + 1])
        return found

    def free(self) -> None:
        self._lib.llama_free(self._handle)

    def _feed(self, tokens: Sequence[int]) -> None:
        """Compute `tokens` as sequence 0, asking for the logits of the last one only."""
        last = len(tokens) - 1
        rows = [(token, position, 0, position == last) for position, token in enumerate(tokens)]
        for start in range(0, len(rows), BATCH):
            self._run(rows[start : start + BATCH])

    def _run(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """One `llama_decode` over rows of (token, position, sequence, wants logits)."""
        batch = self._peer.batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence, wants_logits) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = wants_logits
        status = self._lib.llama_decode(self._handle, batch)
        if status != 0:
            raise PeerFailed(f"llama_decode returned {status} in {self.case.label()}")
        self._lib.llama_synchronize(self._handle)


def surprises_of(logits: NDArray[np.float32], following: Sequence[int]) -> list[float]:
    """How much each following token surprises, in nats; rows beyond the last of them are not looked at."""
    rows = logits[: len(following)].astype(np.float64)
    chosen = rows[np.arange(len(rows)), list(following)]
    found: list[float] = (np.logaddexp.reduce(rows, axis=1) - chosen).tolist()
    return found


def tokens_per_sequence(case: Case) -> int:
    """Cache cells a sequence needs, in the multiples of 256 that llama.cpp works in."""
    needed = case.tokens or case.history + LEAD_IN + case.steps
    return -(-needed // 256) * 256


class Worker:
    """Answers the parent by a peer's methods: `open` comes first. The process's end frees everything."""

    peer: LlamaPeer

    def answer(self, request: dict[str, Any]) -> Any:
        do = request.pop("do")
        if do == "open":
            self.peer = LlamaPeer(**request)
            return self.peer.facts()
        if "case" in request:
            request["case"] = Case(**request["case"])
        return getattr(self.peer, do)(**request)


if __name__ == "__main__":
    answer_lines(Worker().answer)

"""A stand-in for the llama_cpp module. It refuses what llama.cpp does: gaps in a sequence, a full cache."""

import ctypes
import time
from types import SimpleNamespace
from typing import Any


class FakeLlama:
    """Keeps the positions of every sequence; `slow_flash` decides which attention setting is slower."""

    __version__ = "0.0"
    VOCABULARY = 12
    LLAMA_FLASH_ATTN_TYPE_DISABLED, LLAMA_FLASH_ATTN_TYPE_ENABLED = 0, 1

    def __init__(self, slow_flash: int = 0) -> None:
        self.slow_flash = slow_flash
        self.opened: list[SimpleNamespace] = []
        self.freed: list[SimpleNamespace] = []
        self.calls: list[list[tuple[int, int, int, bool]]] = []
        self.closed: list[str] = []
        self.logits = (ctypes.c_float * 0)()

    @staticmethod
    def llama_log_callback(function: Any) -> Any:
        return function

    def llama_log_set(self, callback: Any, data: Any) -> None:
        callback(0, b"", None)

    def llama_backend_init(self) -> None:
        pass

    def llama_print_system_info(self) -> bytes:
        return b"CPU : FAKE = 1 "

    def llama_model_default_params(self) -> SimpleNamespace:
        return SimpleNamespace(n_gpu_layers=-1)

    def llama_model_load_from_file(self, path: bytes, params: SimpleNamespace) -> str | None:
        assert params.n_gpu_layers == 0
        return None if b"broken" in path else "model"

    def llama_context_default_params(self) -> SimpleNamespace:
        return SimpleNamespace()

    def llama_model_get_vocab(self, model: str) -> str:
        return "vocabulary"

    def llama_vocab_n_tokens(self, vocabulary: str) -> int:
        return self.VOCABULARY

    def llama_get_logits(self, context: SimpleNamespace) -> Any:
        """After every token the next higher one is expected, by one more than the others."""
        rows = self.calls[-1]
        self.logits = (ctypes.c_float * (len(rows) * self.VOCABULARY))()
        for row, (token, *_) in enumerate(rows):
            self.logits[row * self.VOCABULARY + token + 1] = 1.0
        return ctypes.cast(self.logits, ctypes.POINTER(ctypes.c_float))

    def llama_batch_init(self, tokens: int, embeddings: int, sequences: int) -> SimpleNamespace:
        empty = [0] * tokens
        seq_id = [[0] for _ in range(tokens)]
        return SimpleNamespace(
            n_tokens=0, token=empty[:], pos=empty[:], n_seq_id=empty[:], seq_id=seq_id, logits=empty[:]
        )

    def llama_init_from_model(self, model: str, params: SimpleNamespace) -> SimpleNamespace | None:
        if params.n_ctx > 2**20:
            return None
        context = SimpleNamespace(params=params, length=[0] * params.n_seq_max)
        self.opened.append(context)
        return context

    def llama_get_memory(self, context: SimpleNamespace) -> SimpleNamespace:
        return context

    def llama_decode(self, context: SimpleNamespace, batch: SimpleNamespace) -> int:
        rows = [
            (batch.token[row], batch.pos[row], batch.seq_id[row][0], bool(batch.logits[row]))
            for row in range(batch.n_tokens)
        ]
        self.calls.append(rows)
        for _, position, sequence, _ in rows:
            if position != context.length[sequence]:
                return -1
            context.length[sequence] += 1
        if max(context.length) > context.params.n_ctx // context.params.n_seq_max:
            return 1
        time.sleep(0.003 if context.params.flash_attn_type == self.slow_flash else 0.0005)
        return 0

    def llama_synchronize(self, context: SimpleNamespace) -> None:
        pass

    def llama_memory_clear(self, context: SimpleNamespace, data: bool) -> None:
        context.length = [0] * len(context.length)

    def llama_memory_seq_cp(
        self, context: SimpleNamespace, source: int, target: int, start: int, end: int
    ) -> None:
        assert start == end == -1, "between streams only whole sequences can be copied"
        context.length[target] = context.length[source]

    def llama_memory_seq_rm(self, context: SimpleNamespace, sequence: int, start: int, end: int) -> bool:
        assert end == -1
        context.length[sequence] = min(start, context.length[sequence])
        return True

    def llama_free(self, context: SimpleNamespace) -> None:
        assert all(context is not gone for gone in self.freed)
        self.freed.append(context)

    def llama_batch_free(self, batch: SimpleNamespace) -> None:
        self.closed.append("batch")

    def llama_model_free(self, model: str) -> None:
        self.closed.append("model")

"""The program compared with, held in a process of its own and spoken to over a pipe.

Two programs in one process would share thread pools and each other's memory. Here each has its own, and
takes its turn while the other waits.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kakeya.bench.line_process import LineProcess
from kakeya.bench.plan import Case
from kakeya.bench.processes import resident_bytes_of
from kakeya.errors import ConfigError, PeerFailed

WORKER = ("-m", "kakeya.bench.llama_peer")


def require_peer(model_path: str | None = None, *, asked_by: str = "--peers") -> None:
    """Refuse a comparison that cannot be made. Raises ConfigError naming what is missing and who asked."""
    if find_spec("llama_cpp") is None:
        raise ConfigError(f"{asked_by} needs llama.cpp; install the extra: pip install 'kakeya[peers]'")
    if model_path is not None and Path(model_path).suffix != ".gguf":
        raise ConfigError(
            f"{asked_by} needs a model in one .gguf file, which llama.cpp can read, got {model_path}"
        )


class PeerProcess(LineProcess):
    """A `Side` that runs elsewhere. Use as a context manager; leaving it ends the process.

    `facts` describes the library, `flash_attention` what was chosen for each case, `our_cpu_share` is the
    largest share of one core that *this* process used while the peer was being timed, and `resident_bytes`
    the most memory that the peer was seen to hold.
    Raises ConfigError when the peer is not installed and PeerFailed when it breaks.
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
        self.facts: dict[str, Any] = self._first_ask(opening)

    def prepare(self, case: Case) -> None:
        reply = self._ask({"do": "prepare", "case": asdict(case)})
        self.flash_attention[case.label] = reply["flash_attention"]

    def measure(self, case: Case) -> float:
        cpu, wall = time.process_time(), time.perf_counter()
        speed: float = self._ask({"do": "measure", "case": asdict(case)})["speed"]
        share = (time.process_time() - cpu) / (time.perf_counter() - wall)
        self.our_cpu_share = max(self.our_cpu_share, share)
        self.resident_bytes = max(self.resident_bytes or 0, resident_bytes_of(self.pid) or 0)
        return speed

    def surprises(self, token_ids: Sequence[int]) -> list[float]:
        """How much each token but the first surprises the peer's model, in nats, in a context of its own."""
        found: list[float] = self._ask({"do": "score", "token_ids": list(token_ids)})["surprises"]
        return found

    def release(self) -> None:
        if self._process.poll() is None:
            self._ask({"do": "release"})

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = super()._ask(request)
        if "error" in reply:
            raise PeerFailed(reply["error"])
        return reply

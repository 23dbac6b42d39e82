"""The program compared with, held in a process of its own and spoken to over a pipe.

Two programs in one process would share thread pools and each other's memory. Here each has its own, and
takes its turn while the other waits.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kakeya.bench.plan import Case
from kakeya.errors import ConfigError, PeerFailed

# How long a peer may take to leave before it is made to.
PATIENCE_SECONDS = 10.0
WORKER = ("-m", "kakeya.bench.llama_peer")


def require_peer(model_path: str | None = None) -> None:
    """Refuse a comparison that cannot be made. Raises ConfigError naming what is missing."""
    if find_spec("llama_cpp") is None:
        raise ConfigError("--peers needs llama.cpp; install the extra: pip install 'kakeya[peers]'")
    if model_path is not None and Path(model_path).suffix != ".gguf":
        raise ConfigError(
            f"--peers needs a model in one .gguf file, which llama.cpp can read, got {model_path}"
        )


class PeerProcess:
    """A `Side` that runs elsewhere. Use as a context manager; leaving it ends the process.

    `facts` describes the library, `flash_attention` what was chosen for each case, and `our_cpu_share` is
    the largest share of one core that *this* process used while the peer was being timed.
    Raises ConfigError when the peer is not installed and PeerFailed when it breaks.
    """

    name = "llama.cpp"

    def __init__(
        self, model_path: str, threads: int, text: Sequence[int], worker: Sequence[str] = WORKER
    ) -> None:
        # Closed by `close`; a pipe nobody reads could fill up and stall the peer.
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self.flash_attention: dict[str, bool] = {}
        self.our_cpu_share = 0.0
        try:
            self.facts = self._ask({"do": "open", "path": model_path, "threads": threads, "text": list(text)})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def prepare(self, case: Case) -> None:
        reply = self._ask({"do": "prepare", "case": asdict(case)})
        self.flash_attention[case.label] = reply["flash_attention"]

    def measure(self, case: Case) -> float:
        cpu, wall = time.process_time(), time.perf_counter()
        speed: float = self._ask({"do": "measure", "case": asdict(case)})["speed"]
        share = (time.process_time() - cpu) / (time.perf_counter() - wall)
        self.our_cpu_share = max(self.our_cpu_share, share)
        return speed

    def release(self) -> None:
        if self._process.poll() is None:
            self._ask({"do": "release"})

    def close(self) -> None:
        """End the process: politely by closing its input, by force when it does not react."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it is gone already, with the request it never read
        try:
            self._process.wait(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise PeerFailed(f"{self.name} ended unexpectedly: {self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise PeerFailed(reply["error"])
        return reply

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else f"exit status {self._process.returncode}"

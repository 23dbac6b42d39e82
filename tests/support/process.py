"""A real `kakeya serve` process, ready to be used."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import kakeya
from kakeya.client import Retry
from support.served import free_port

# A window that fills quickly, and bits that can be compared.
SMALL_EXACT = (
    *("--sink", "2", "--window", "30", "--numerics", "exact"),
    *("--dtype", "float32", "--weights", "float32", "--threads", "1"),
)
PROGRAM = "from kakeya.cli import main; main()"


@dataclass(frozen=True)
class ServerProcess:
    """A server that has loaded its model."""

    address: str
    metrics_port: int
    process: "subprocess.Popen[bytes]"


@contextmanager
def server_process(model: Path, *flags: str) -> Iterator[ServerProcess]:
    """Runs until the block ends, then must leave cleanly."""
    address, metrics_port = f"127.0.0.1:{free_port()}", free_port()
    settings = ("--bind", address, "--metrics-port", str(metrics_port), "--log-level", "error")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "serve", "--model", str(model), *settings, *flags],
        stderr=subprocess.DEVNULL,
    )
    try:
        with kakeya.Client(address, retry=Retry(attempts=100, longest_delay=0.5)) as client:
            client.server_info()
        yield ServerProcess(address, metrics_port, process)
    finally:
        process.terminate()
        assert process.wait(30) == 0

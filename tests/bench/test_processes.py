"""Processes that benchmarks start: programs that answer lines, and servers of our own."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kakeya.bench import processes
from kakeya.bench.processes import LineProcess, ServerProcess, server_process
from kakeya.bench.usage import resident_bytes
from kakeya.cli.serve_options import ServeOptions
from kakeya.errors import ConfigError, PeerFailed
from kakeya.options import EngineOptions

# Answers what it is sent, and takes its time when it is told to.
ECHO = """
import json, sys, time
for line in sys.stdin:
    seconds = json.loads(line)
    print(f"waits {seconds} s", file=sys.stderr, flush=True)
    time.sleep(seconds)
    print(line, end="", flush=True)
"""


def test_an_answer_that_takes_too_long_ends_the_process() -> None:
    with LineProcess(("-c", ECHO), own_session=True) as process:
        assert process.ask_within(30, 0.0) == 0.0
        with pytest.raises(PeerFailed, match="no answer within 0.2 s; the last it said: waits 50 s"):
            process.ask_within(0.2, 50)
        with pytest.raises(PeerFailed, match="ended unexpectedly"):
            process.ask_within(30, 0.0)
    assert not process.running


def test_the_engine_becomes_flags_that_the_server_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the user's settings do not reach it."""
    seen: dict[str, Any] = {}
    real = subprocess.Popen

    def noted(command: list[str], **options: Any) -> object:
        seen.update(options["env"], flags=command[4:])
        return real(command, **options)

    monkeypatch.setenv("KAKEYA_API_KEY", "secret")
    monkeypatch.setenv("KAKEYA_CACHE_DIR", "/somewhere")
    monkeypatch.setattr(processes, "KAKEYA", "")
    monkeypatch.setattr(subprocess, "Popen", noted)
    with ServerProcess(EngineOptions(sink=3, window=77, threads=2, proposer_api_key="for-them"), 9):
        pass
    given = dict(zip(seen["flags"][::2], seen["flags"][1::2], strict=True))
    assert set(given) <= {f"--{name.replace('_', '-')}" for name in ServeOptions.__dataclass_fields__}
    assert (given["--sink"], given["--window"], given["--capacity"]) == ("3", "77", "9")
    assert (given["--numerics"], given["--http"]) == ("fast", "off")
    assert "KAKEYA_API_KEY" not in seen
    assert "for-them" not in seen["flags"], "anybody can read a command line"
    assert seen["KAKEYA_PROPOSER_API_KEY"] == "for-them"
    assert seen["KAKEYA_CACHE_DIR"] == "/somewhere"


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (processes.KAKEYA, "kakeya: .*absent"),
        ("", "exit status 0"),
        ("import sys; sys.exit('kakeya: no room\\nsome warning of a library')", "kakeya: no room$"),
        (DEAF, "it took too long"),
    ],
)
def test_a_server_that_does_not_start_says_why_and_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, why: str
) -> None:
    started: list[ServerProcess] = []
    real: Callable[..., None] = ServerProcess.__init__

    def noted(self: ServerProcess, *arguments: Any, **options: Any) -> None:
        real(self, *arguments, **options)
        started.append(self)

    async def start() -> None:
        async with server_process(EngineOptions(model=str(tmp_path / "absent")), 1):
            pass

    monkeypatch.setattr(ServerProcess, "__init__", noted)
    monkeypatch.setattr(processes, "KAKEYA", program)
    if program == DEAF:
        monkeypatch.setattr(processes, "START_SECONDS", 0.5)
        monkeypatch.setattr(processes, "PATIENCE_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=f"the server did not start: {why}"):
        asyncio.run(start())
    assert resident_bytes(started[0].pid) is None


def test_a_server_leaves_with_its_parent() -> None:
    """The system closes the pipe of a parent that was killed."""
    assert processes.KAKEYA.startswith(processes._LEAVE_WITH_PARENT)
    program = processes._LEAVE_WITH_PARENT + "import time; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        assert process.poll() is None
        process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM

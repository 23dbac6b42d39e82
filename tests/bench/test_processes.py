"""Other processes: what they use of the machine, programs that answer lines, and servers of our own."""

import asyncio
import mmap
import os
import resource
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from kakeya.bench import processes
from kakeya.bench.processes import (
    Bystanders,
    LineProcess,
    ServerProcess,
    raise_descriptor_limit,
    resident_bytes,
    server_process,
)
from kakeya.cli.serve_options import ServeOptions
from kakeya.errors import ConfigError, PeerFailed
from kakeya.options import EngineOptions


def test_resident_bytes_follow_an_allocation() -> None:
    size = 2**25
    with mmap.mmap(-1, size) as fresh_pages:
        before = resident_bytes() or 0
        fresh_pages.write(b"x" * size)
        assert (resident_bytes() or 0) - before > size * 0.9


def test_a_process_that_is_gone_has_no_memory_and_no_share() -> None:
    process = subprocess.Popen(["sleep", "60"])
    bystanders = Bystanders([process.pid])
    assert bystanders.share() is not None
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert resident_bytes(process.pid) is None  # nobody has waited for it yet
    process.wait()
    assert resident_bytes(process.pid) is None
    assert bystanders.share() is None
    assert Bystanders([os.getpid(), None]).share() is None


def test_bystanders_use_what_we_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 110.0])
    times = namedtuple("times", "user nice system idle iowait guest guest_nice")
    machine, ours = [times(0, 0, 0, 0, 0, 0, 0)], [SimpleNamespace(user=0.0, system=0.0)]
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(psutil, "cpu_times", lambda: machine[-1])
    monkeypatch.setattr(psutil, "Process", lambda pid: SimpleNamespace(cpu_times=lambda: ours[-1]))
    bystanders = Bystanders([7])
    # Guests are counted among users, and waiting is not work.
    machine.append(times(8, 1, 3, 1000, 500, 2, 1))
    ours.append(SimpleNamespace(user=5.0, system=3.0))
    assert bystanders.share() == 4 / 20  # 4 of 20 core seconds


def test_our_own_work_does_not_count_and_that_of_others_does() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinning:
        strangers, company = Bystanders([os.getpid()]), Bystanders([os.getpid(), spinning.pid])
        spinner = psutil.Process(spinning.pid)
        while spinner.cpu_times().user < 0.5:  # beside busy others that takes a while
            time.sleep(0.1)
        counted, ignored = strangers.share(), company.share()
        spinning.kill()
    assert counted is not None
    assert ignored is not None
    assert counted > ignored


def test_the_descriptor_limit_is_raised_and_told() -> None:
    program = (
        "import resource; from kakeya.bench.processes import raise_descriptor_limit; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512)); "
        "print(*(raise_descriptor_limit(n)['after'] for n in (32, 128, 4096))); "
        "print(raise_descriptor_limit(10_000)['before'])"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert outcome.stdout.split() == ["64", "128", "512", "512"]
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_descriptor_limit(1) == {"wanted": 1, "before": before[0], "after": before[0]}
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


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

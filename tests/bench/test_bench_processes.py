"""Other processes: what they use, servers of our own, signals as requests; and what simulated users say."""

import asyncio
import mmap
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from kakeya.bench import processes
from kakeya.bench.interrupts import Interruption, interruptible
from kakeya.bench.processes import (
    Bystanders,
    LineProcess,
    ServerProcess,
    raise_descriptor_limit,
    resident_bytes,
    server_process,
)
from kakeya.bench.text import Messages
from kakeya.cli.serve_options import ServeOptions
from kakeya.errors import ConfigError, PeerFailed
from kakeya.options import EngineOptions


def test_resident_bytes_follow_an_allocation() -> None:
    size = 2**25
    with mmap.mmap(-1, size) as fresh_pages:
        before = resident_bytes()
        fresh_pages.write(b"x" * size)
        after = resident_bytes()
    assert before is not None
    assert after is not None
    assert after - before > size * 0.9


def test_a_process_that_is_gone_has_no_memory() -> None:
    process = subprocess.Popen(["true"])
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert resident_bytes(process.pid) is None  # nobody has waited for it yet
    process.wait()
    assert resident_bytes(process.pid) is None


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


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_our_own_work_does_not_count_and_that_of_others_does() -> None:
    process = multiprocessing.get_context("spawn").Process(target=_spin, args=(1.2,))
    process.start()
    assert process.pid is not None
    time.sleep(0.4)  # let it come up
    strangers, company = Bystanders([os.getpid()]), Bystanders([os.getpid(), process.pid])
    time.sleep(0.5)
    counted, ignored = strangers.share(), company.share()
    process.join()
    assert counted is not None
    assert ignored is not None
    assert counted > ignored


def test_a_share_that_went_with_its_process_is_unknown() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        bystanders = Bystanders([process.pid])
        assert bystanders.share() is not None
        process.kill()
    assert bystanders.share() is None


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


def test_the_descriptor_limit_is_raised_and_told() -> None:
    program = (
        "import resource; from kakeya.bench.processes import raise_descriptor_limit; "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512)); "
        "print(*(raise_descriptor_limit(n)['after'] for n in (32, 128, 4096))); "
        "print(raise_descriptor_limit(10_000)['before'])"
    )
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert outcome.stdout.split() == ["64", "128", "512", "512"]


def test_a_limit_that_is_high_enough_stays() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raise_descriptor_limit(1) == {"wanted": 1, "before": before[0], "after": before[0]}
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == before


def test_the_engine_becomes_flags_that_the_server_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the user's settings do not reach it."""
    seen: dict[str, list[str]] = {}
    environment: dict[str, str] = {}
    real = subprocess.Popen

    def noted(command: list[str], **options: dict[str, str]) -> object:
        seen["flags"] = command[4:]
        environment.update(options["env"])
        return real(command, **options)

    monkeypatch.setenv("KAKEYA_API_KEY", "secret")
    monkeypatch.setenv("KAKEYA_CACHE_DIR", "/somewhere")
    monkeypatch.setattr(processes, "_PROGRAM", "")
    monkeypatch.setattr(subprocess, "Popen", noted)
    with (
        ServerProcess(EngineOptions(sink=3, window=77, threads=2), 9) as server,
        pytest.raises(ConfigError, match="the server did not start: exit status 0"),
    ):
        asyncio.run(server.ready())
    given = dict(zip(seen["flags"][::2], seen["flags"][1::2], strict=True))
    known = {f"--{name.replace('_', '-')}" for name in ServeOptions.__dataclass_fields__}
    assert set(given) <= known
    assert (given["--sink"], given["--window"], given["--capacity"]) == ("3", "77", "9")
    assert (given["--numerics"], given["--http"]) == ("fast", "off")
    assert "KAKEYA_API_KEY" not in environment
    assert environment["KAKEYA_CACHE_DIR"] == "/somewhere"


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    async def start() -> None:
        async with server_process(EngineOptions(model=str(tmp_path / "absent")), 1):
            pass

    with pytest.raises(ConfigError, match="the server did not start: .*absent"):
        asyncio.run(start())


def test_a_server_that_hangs_is_given_up_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    monkeypatch.setattr(processes, "_PROGRAM", deaf)
    monkeypatch.setattr(processes, "START_SECONDS", 0.5)
    monkeypatch.setattr(processes, "PATIENCE_SECONDS", 0.2)
    server = ServerProcess(EngineOptions(), 1)
    with pytest.raises(ConfigError, match="it took too long"):
        asyncio.run(server.ready())
    server.close()
    assert resident_bytes(server.pid) is None


def test_a_server_that_says_more_than_why_is_quoted_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; sys.exit('kakeya: no room\\nsome warning of a library')"
    monkeypatch.setattr(processes, "_PROGRAM", program)
    server = ServerProcess(EngineOptions(), 1)
    with pytest.raises(ConfigError, match="did not start: kakeya: no room$"):
        asyncio.run(server.ready())
    server.close()


def test_a_server_leaves_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_PROGRAM", processes._LEAVE_WITH_PARENT + "import time; time.sleep(60)")
    server = ServerProcess(EngineOptions(), 1)
    assert server._process.poll() is None
    server._process.stdin.close()  # as the system does for a parent that was killed
    assert server._process.wait(10) == -signal.SIGTERM
    server.close()
    assert processes._PROGRAM.startswith(processes._LEAVE_WITH_PARENT)


def test_work_goes_on_until_somebody_asks() -> None:
    async def story() -> None:
        interruption = Interruption()
        cancelled = asyncio.Event()

        async def work(seconds: float) -> str:
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            return "done"

        assert await interruption.unless_asked(work(0)) == "done"
        asyncio.get_running_loop().call_later(0.05, interruption.ask, "first")
        assert await interruption.unless_asked(work(60)) is None
        assert cancelled.is_set()
        interruption.ask("second")
        assert interruption.reason == "first"
        began = time.monotonic()
        await interruption.sleep(60)
        assert time.monotonic() - began < 10

    asyncio.run(story())


def test_errors_of_the_work_come_through() -> None:
    async def broken() -> None:
        raise ValueError("broken")

    async def story() -> None:
        await Interruption().unless_asked(broken())

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(story())


def test_signals_ask_meanwhile_and_do_what_they_did_afterwards() -> None:
    def ours(*_: object) -> None:
        pass

    before = signal.signal(signal.SIGTERM, ours)

    async def story() -> str | None:
        interruption = Interruption()
        with interruptible(interruption):
            os.kill(os.getpid(), signal.SIGTERM)
            await interruption.sleep(30)
            return interruption.reason

    try:
        assert asyncio.run(story()) == "SIGTERM"
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)


def words(text: str) -> list[int]:
    """A tokenizer that has a token for each word."""
    return [len(word) for word in text.split()]


@pytest.mark.parametrize("tokens", [1, 7, 5000])
def test_messages_have_their_length_and_their_seed(tokens: int) -> None:
    first, again, other = (Messages(words, tokens, seed) for seed in (3, 3, 4))
    texts = [first.next_text() for _ in range(5)]
    assert texts == [again.next_text() for _ in range(5)]
    assert texts != [other.next_text() for _ in range(5)]
    assert len(set(texts)) > 1
    assert all(len(first.encoded(text)) == tokens for text in texts)


def test_a_message_that_comes_out_short_is_said_again() -> None:
    assert Messages(words, 10, 0).encoded("a bb ccc dddd") == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]

"""Other processes: their memory, servers of our own, signals as requests; and what simulated users say."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kakeya.bench import server_process as servers
from kakeya.bench.interrupts import Interruption, interruptible
from kakeya.bench.machine import Bystanders, resident_bytes
from kakeya.bench.messages import Messages
from kakeya.bench.processes import raise_descriptor_limit, resident_bytes_of, share_of
from kakeya.bench.server_process import ServerProcess, serve_flags, server_process
from kakeya.cli.serve_options import ServeOptions
from kakeya.config import CacheConfig, EngineConfig
from kakeya.errors import ConfigError


def test_memory_of_a_process_is_what_it_says_itself() -> None:
    assert resident_bytes_of(os.getpid()) == pytest.approx(resident_bytes(), rel=0.05)


def test_a_process_that_is_gone_has_no_memory(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    assert resident_bytes_of(process.pid) is None
    # A zombie's file is there and empty of numbers on some systems.
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "statm").touch()
    assert resident_bytes_of(7, tmp_path) is None


def test_memory_where_there_is_no_proc(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert resident_bytes_of(os.getpid(), absent) == pytest.approx(resident_bytes(), rel=0.2)
    assert resident_bytes_of(2**22 + 1, absent) is None


def test_a_share_that_went_with_its_process_is_unknown() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        bystanders = Bystanders([process.pid])
        assert share_of(bystanders) is not None
        process.kill()
    assert share_of(bystanders) is None


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


def test_the_engine_becomes_flags_that_the_server_knows() -> None:
    flags = serve_flags("m", EngineConfig(cache=CacheConfig(3, 77), capacity=9, threads=2))
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    known = {f"--{name.replace('_', '-')}" for name in ServeOptions.__dataclass_fields__}
    assert set(given) <= known
    assert (given["--sink"], given["--window"], given["--capacity"]) == ("3", "77", "9")
    assert given["--numerics"] == "fast"


def test_a_server_that_cannot_start_says_why(tmp_path: Path, tiny_engine: EngineConfig) -> None:
    async def start() -> None:
        async with server_process(str(tmp_path / "absent"), tiny_engine):
            pass

    with pytest.raises(ConfigError, match="the server did not start: .*absent"):
        asyncio.run(start())


def test_the_users_settings_do_not_reach_the_server(
    tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real server came up with them absent; a new one gets an environment without them."""
    seen: dict[str, str] = {}
    monkeypatch.setenv("KAKEYA_API_KEY", "secret")
    monkeypatch.setenv("KAKEYA_CACHE_DIR", "/somewhere")
    monkeypatch.setattr(servers, "_PROGRAM", "import os, sys; sys.exit(os.environ.get('KAKEYA_API_KEY'))")
    real = subprocess.Popen

    def noted(*args: object, **options: dict[str, str]) -> object:
        seen.update(options["env"])
        return real(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", noted)
    server = ServerProcess("m", EngineConfig())
    with pytest.raises(ConfigError, match="exit status 0"):
        asyncio.run(server.ready())
    asyncio.run(server.stop())
    assert "KAKEYA_API_KEY" not in seen
    assert seen["KAKEYA_CACHE_DIR"] == "/somewhere"


def test_a_server_that_hangs_is_given_up_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    monkeypatch.setattr(servers, "_PROGRAM", deaf)
    monkeypatch.setattr(servers, "_START_SECONDS", 0.5)
    monkeypatch.setattr(servers, "_STOP_SECONDS", 0.2)
    server = ServerProcess("m", EngineConfig())
    with pytest.raises(ConfigError, match="it took too long"):
        asyncio.run(server.ready())
    asyncio.run(server.stop())
    assert resident_bytes_of(server.pid) is None


def test_a_server_that_says_more_than_why_is_quoted_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; sys.exit('kakeya: no room\\nsome warning of a library')"
    monkeypatch.setattr(servers, "_PROGRAM", program)
    server = ServerProcess("m", EngineConfig())
    with pytest.raises(ConfigError, match="did not start: kakeya: no room$"):
        asyncio.run(server.ready())
    asyncio.run(server.stop())


def test_a_server_leaves_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_PROGRAM", servers._LEAVE_WITH_PARENT + "import time; time.sleep(60)")
    server = ServerProcess("m", EngineConfig())
    assert server._process.poll() is None
    server._process.stdin.close()  # as the system does for a parent that was killed
    assert server._process.wait(10) == -signal.SIGTERM
    asyncio.run(server.stop())
    assert servers._PROGRAM.startswith(servers._LEAVE_WITH_PARENT)


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
        with interruptible() as interruption:
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

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from kakeya.bridge.process import MARK, RunProcess
from support.bridging import until

# Starts a process in a session of its own, which holds the pipe and stays.
LEAVES_ONE = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-ISc", "import time; time.sleep(600)"], start_new_session=True)
print(child.pid, flush=True)
"""


def started(program: str, folder: Path, mark: str = "a-run") -> RunProcess:
    return RunProcess([sys.executable, "-ISc", program], folder, mark)


def is_there(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_it_runs_in_its_folder_with_a_clean_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KAKEYA_API_KEY", "the bridge's own")
    process = started(f"import os; print(os.getcwd(), os.environ['{MARK}'], *os.environ)", tmp_path)
    said = b"".join(process.output()).decode()
    assert process.exit_status == 0
    assert said.startswith(f"{tmp_path} a-run ")
    assert "KAKEYA_API_KEY" not in said, "a run has no use for the keys of the bridge"
    process.close()


def test_what_it_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    bystander = subprocess.Popen([sys.executable, "-ISc", "input()"], stdin=subprocess.PIPE)
    process = started(LEAVES_ONE, tmp_path)
    child = int(b"".join(process.output()))
    until(lambda: not is_there(child))
    process.close()
    assert bystander.poll() is None, "nobody else's process is touched"
    bystander.communicate()


def test_killing_reaches_sessions_of_their_own(tmp_path: Path) -> None:
    process = started(LEAVES_ONE + "import time; time.sleep(600)", tmp_path)
    said = process.output()
    child = int(next(piece for piece in said if piece))
    assert is_there(child)
    process.kill()
    list(said)
    assert process.exit_status == -9
    until(lambda: not is_there(child))
    process.close()


def test_one_that_closes_its_output_is_still_watched(tmp_path: Path) -> None:
    process = started("import os, time; os.close(1); os.close(2); time.sleep(600)", tmp_path)
    said = process.output()
    assert [next(said) for _ in range(3)] == [b""] * 3, "there are moments to look at its limits"
    process.ask_to_end()
    assert list(said) in ([], [b""])
    assert process.exit_status == -15
    process.ask_to_end()
    process.close()


def test_it_ends_with_the_bridge(tmp_path: Path) -> None:
    """Its input ends, however the bridge does."""
    process = started("import sys; sys.stdin.read(); print('alone')", tmp_path)
    assert process._process.stdin is not None
    os.close(os.dup(process._process.stdin.fileno()))
    process._process.stdin.close()
    assert b"".join(process.output()) == b"alone\n"
    process.close()

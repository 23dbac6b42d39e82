"""`kakeya chat` as people meet it: a real process, in a pipe and in a pseudo-terminal."""

import codecs
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.untraced import KAKEYA

COMMAND = [sys.executable, "-c", KAKEYA]
# The process makes its stdin the terminal that Ctrl-C comes from.
AT_TERMINAL = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n{KAKEYA}"
PATIENCE = 60.0


class Terminal:
    """A process with a pseudo-terminal as its stdin, stdout and stderr."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = os.openpty()
        self._utf8 = codecs.getincrementaldecoder("utf-8")()
        self._unread = ""
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", AT_TERMINAL, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            env=environment,
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, pattern: str) -> None:
        """Read until the pattern appears; what comes after it is for the next call."""
        deadline = time.monotonic() + PATIENCE
        while (match := re.search(pattern, self._unread)) is None:
            assert time.monotonic() < deadline, f"{pattern!r} did not appear in {self._unread!r}"
            if select.select([self._master], [], [], 0.1)[0]:
                self._unread += self._utf8.decode(os.read(self._master, 4096))
        self._unread = self._unread[match.end() :]

    def press_until(self, key: str, pattern: str) -> None:
        """Press a key until it is noticed: readline misses one that comes just as it shows the prompt."""
        silence = True
        while re.search(pattern, self._unread) is None:
            if silence:
                self.type(key)
            silence = not select.select([self._master], [], [], 2.0)[0]
            if not silence:
                self._unread += self._utf8.decode(os.read(self._master, 4096))
        self.expect(pattern)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(default_model: Path) -> Iterator[Terminal]:
    # Without a penalty the model repeats itself: a long answer does not end before somebody stops it.
    options = ["--temperature", "0", "--repetition-penalty", "1", "--window", "124", "--max-tokens", "20000"]
    terminal = Terminal("chat", *options)
    yield terminal
    terminal.close()


def test_ctrl_c_stops_the_answer_and_the_chat_goes_on(terminal: Terminal) -> None:
    terminal.expect("you › ")
    terminal.type("Write a very long story about a cat.\r")
    terminal.expect(r"a cat\.\r\n[^\r\n]{8}")
    terminal.type("\x03")
    terminal.expect(r"\(stopped")
    terminal.expect("you › ")
    terminal.press_until("\x03", "/exit leaves")
    terminal.type("What is 2+2?\r")
    terminal.expect(r"2\+2\?\r\n[^\r\n]+\r\n")
    terminal.expect("you › ")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE) == 0


def test_a_pipe_gets_the_answer_and_nothing_else(default_model: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "chat", "--temperature", "0", "--repetition-penalty", "1", "--window", "124"],
        input="What is 2+2?\n",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0
    assert "4" in done.stdout
    assert done.stdout.count("\n") == 1
    assert "\x1b" not in done.stdout + done.stderr
    assert "kernels" in done.stderr


def test_a_reader_who_leaves_ends_the_program_quietly(default_model: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate", "Count from one to one hundred in words.", "--max-tokens", "400"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    assert process.wait(PATIENCE) == 1
    process.stderr.close()


def test_kernels_and_settings_reach_the_engine(default_model: Path) -> None:
    options = ["--kernels", "torch", "--weights", "int8", "--dtype", "float32", "--numerics", "exact"]
    done = subprocess.run(
        [*COMMAND, "chat", *options, "--threads", "1", "--sink", "2", "--window", "30", "--json"],
        input="",
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0
    assert "weights int8" in done.stderr
    assert "float32 · kernels torch · 1 threads" in done.stderr
    assert "the first 16 and the last 16 tokens" in done.stderr
    assert done.stdout == ""

"""Programs that tests run: `kakeya` in this process, Python, and Node beside the packages of its clients."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support.untraced import KAKEYA, importing, untraced_environment

TESTS = Path(__file__).parents[1]
NODE_FOLDER = TESTS / "compat/node"
SDK_FOLDER = TESTS.parent / "sdks/typescript"
# Connections stay on this machine, whatever proxy is set.
_NO_PROXY = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


@dataclass(frozen=True)
class Outcome:
    """The exit status of `kakeya`, and what it wrote."""

    status: int
    out: str
    err: str

    def settings(self) -> dict[str, object]:
        """What `--print-config` printed."""
        assert self.status == 0, self.err
        return tomllib.loads(self.out)


Run = Callable[..., Outcome]


class Process:
    """A running verb of `kakeya`, and what it has written to stderr so far."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", importing("grpc.aio") + KAKEYA, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ,
        )
        self.said = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said += line

    def wait_for(self, pattern: str, seconds: float = 60.0) -> str:
        """The first group of a pattern, once the process has said it."""
        deadline = time.monotonic() + seconds
        while (match := re.search(pattern, self.said)) is None:
            assert time.monotonic() < deadline, self.said
            assert self.process.poll() is None, self.said
            time.sleep(0.02)
        return match[1]

    def end(self) -> int:
        """The exit status, after a gentle signal."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(30)
        self._reader.join()
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


@contextmanager
def process(*arguments: str) -> Iterator[Process]:
    running = Process(*arguments)
    try:
        yield running
    finally:
        running.close()


def run_python(*arguments: str) -> str:
    """What a program of its own prints. Our support can be imported there."""
    own = {
        "PYTHONPATH": str(TESTS),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks the internet for prices when it is imported
    }
    return _printed([sys.executable, *arguments], **_NO_PROXY, **own)


def processor_seconds(program: str) -> float:
    """What a program takes of the processor: other work on the machine does not count."""
    timed = f"{program}\nimport time, sys\nprint(time.process_time(), file=sys.stderr)"
    ended = subprocess.run([sys.executable, "-c", timed], check=True, capture_output=True, text=True)
    return float(ended.stderr.splitlines()[-1])


def prepare_node(folder: Path) -> None:
    """The packages that the folder's lock file names, and its TypeScript compiled; neither is done twice."""
    _printed([sys.executable, str(TESTS.parent / "scripts/node_packages.py"), str(folder)])


def node_is_missing() -> bool:
    return shutil.which("node") is None or shutil.which("npm") is None


def run_node(
    *arguments: str, folder: Path = NODE_FOLDER, stdin: str | None = None, **environment: str
) -> str:
    """What Node prints, run where the packages are."""
    return _printed([_found("node"), *arguments], folder, stdin, **_NO_PROXY, **environment)


async def start_node(folder: Path, *arguments: str, **environment: str) -> str:
    """The same for a program that talks to servers on the event loop of this process."""
    return await asyncio.to_thread(run_node, *arguments, folder=folder, **environment)


def run_npm(*arguments: str, folder: Path) -> str:
    """What npm prints, run in `folder`."""
    return _printed([_found("npm"), *arguments], folder)


def _found(program: str) -> str:
    path = shutil.which(program)
    assert path, f"{program} is needed; scripts/system_packages.sh installs it"
    return path


def _printed(
    command: list[str], folder: Path | None = None, stdin: str | None = None, **environment: str
) -> str:
    ended = subprocess.run(
        command,
        cwd=folder,
        input=stdin,
        env=untraced_environment() | environment,
        timeout=110,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout

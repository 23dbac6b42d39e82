"""Programs that tests run: `kakeya` in this process, Python, and Node beside the packages of its client."""

import fcntl
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.untraced import untraced_environment

TESTS = Path(__file__).parents[1]
NODE_FOLDER = TESTS / "compat/node"
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


def run_python(*arguments: str) -> str:
    """What a program of its own prints. Our support can be imported there."""
    own = {
        "PYTHONPATH": str(TESTS),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks the internet for prices when it is imported
    }
    return _printed([sys.executable, *arguments], **_NO_PROXY, **own)


def install_packages() -> None:
    """The packages that the lock file names. What is there already is not fetched again.

    Of several processes one fetches them, and the others wait.
    """
    installed, wanted = NODE_FOLDER / "node_modules/.package-lock.json", NODE_FOLDER / "package-lock.json"
    with wanted.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not installed.exists() or installed.stat().st_mtime < wanted.stat().st_mtime:
            _printed([_found("npm"), "ci", "--no-audit", "--no-fund"], NODE_FOLDER)


def run_node(*arguments: str, **environment: str) -> str:
    """What Node prints, run where the packages are."""
    return _printed([_found("node"), *arguments], NODE_FOLDER, **_NO_PROXY, **environment)


def _found(program: str) -> str:
    path = shutil.which(program)
    assert path, f"{program} is needed; scripts/system_packages.sh installs it"
    return path


def _printed(command: list[str], folder: Path | None = None, **environment: str) -> str:
    ended = subprocess.run(
        command,
        cwd=folder,
        env=untraced_environment() | environment,
        timeout=110,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout

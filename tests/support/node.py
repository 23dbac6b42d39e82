"""Node, beside the packages that the tests of the JavaScript client need."""

import os
import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "clients/node"


def install_packages() -> None:
    """The packages that the lock file names. What is there already is not fetched again."""
    installed, wanted = FOLDER / "node_modules/.package-lock.json", FOLDER / "package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < wanted.stat().st_mtime:
        _run("npm", "ci", "--no-audit", "--no-fund")


def run_node(*arguments: str, **environment: str) -> str:
    """What Node prints, run where the packages are."""
    return _run("node", *arguments, **environment)


def _run(program: str, *arguments: str, **environment: str) -> str:
    found = shutil.which(program)
    assert found, f"{program} is needed; scripts/system_packages.sh installs it"
    # Connections stay on this machine, whatever proxy is set.
    own = {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", **environment} if program == "node" else {}
    ended = subprocess.run(
        [found, *arguments],
        cwd=FOLDER,
        env=os.environ | own,
        timeout=110,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout

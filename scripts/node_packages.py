"""Installs the packages that a folder's package-lock.json names, and compiles its TypeScript if it has some.

    python scripts/node_packages.py sdks/typescript

What is there already is neither fetched nor compiled again. Of several processes one does the work, and the
others wait: tests and checks run beside each other.
"""

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_SOURCES = ("src", "tests", "examples")


def main(folders: list[str]) -> int:
    if shutil.which("npm") is None:
        sys.stderr.write("npm is needed; scripts/system_packages.sh installs it\n")
        return 1
    for folder in map(Path, folders):
        prepare(folder)
    return 0


def prepare(folder: Path) -> None:
    """Raises CalledProcessError when npm or the compiler fails."""
    with (folder / "package-lock.json").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        installed, built = folder / "node_modules/.package-lock.json", folder / "dist/.built"
        if _is_older(installed, [folder / "package-lock.json"]):
            _run(["npm", "ci", "--no-audit", "--no-fund", "--prefer-offline"], folder)
        if (folder / "tsconfig.json").exists() and _is_older(built, [installed, *_sources(folder)]):
            _run(["node", "node_modules/typescript/bin/tsc"], folder)
            built.touch()


def _sources(folder: Path) -> Iterator[Path]:
    yield folder / "tsconfig.json"
    for name in _SOURCES:
        # A folder is newer than what was removed from it.
        yield from (folder / name).rglob("*")


def _is_older(made: Path, inputs: list[Path]) -> bool:
    return not made.exists() or any(made.stat().st_mtime < path.stat().st_mtime for path in inputs)


def _run(command: list[str], folder: Path) -> None:
    subprocess.run(command, cwd=folder, stdout=sys.stderr, check=True, timeout=300)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

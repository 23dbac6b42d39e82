"""Checkpoints by hub id: `org/name`, or `org/name/file.gguf` for one file of a repository.

Needs the optional package huggingface_hub (`pip install 'kakeya[hub]'`). Of a repository with safetensors
the weights and the JSON files are fetched; of one without, its only GGUF file.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from kakeya.errors import ConfigError, DownloadFailed, ModelNotFound, UnsupportedModel
from kakeya.models import store
from kakeya.models.store import Progress

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_ID = re.compile(rf"({_PART})/({_PART})(?:/(.+\.gguf))?")
_SEPARATOR = "--"
_COMPANIONS = (".json", ".jinja")


@dataclass(frozen=True)
class Repository:
    """A repository of the hub, or one GGUF file in it."""

    owner: str
    name: str
    file: str | None = None

    @property
    def hub_id(self) -> str:
        return f"{self.owner}/{self.name}"

    @property
    def folder(self) -> Path:
        return _hub_dir() / f"{self.owner}{_SEPARATOR}{self.name}"

    @property
    def checkpoint(self) -> Path:
        """Where a directory of safetensors goes."""
        return self.folder / "checkpoint"

    def gguf(self, file: str) -> Path:
        """Where one GGUF file goes. Beside the others: each was asked for by name."""
        return self.folder / "gguf" / file

    def fetched_path(self) -> Path | None:
        """What was fetched before: the named file, the folder of safetensors, or the only GGUF file."""
        if self.file is not None:
            return path if (path := self.gguf(self.file)).is_file() else None
        if self.checkpoint.is_dir():
            return self.checkpoint
        files = sorted(self.gguf("").rglob("*.gguf"))
        return files[0] if len(files) == 1 else None


def parse(name: str) -> Repository | None:
    """The repository a name means, or None when it cannot be a hub id."""
    match = _HUB_ID.fullmatch(name)
    return Repository(match[1], match[2], match[3]) if match else None


def fetched_checkpoints() -> list[tuple[str, Path]]:
    """Name and path of everything in the cache that came from the hub."""
    found = []
    for folder in sorted(_hub_dir().glob(f"*{_SEPARATOR}*")):
        repository = Repository(*folder.name.split(_SEPARATOR, 1))
        if repository.checkpoint.is_dir():
            found.append((repository.hub_id, repository.checkpoint))
        ggufs = repository.gguf("")
        files = sorted(ggufs.rglob("*.gguf"))
        found += [(f"{repository.hub_id}/{path.relative_to(ggufs).as_posix()}", path) for path in files]
    return found


def fetch(repository: Repository, progress: Progress) -> Path:
    """Fetch a repository into the cache and return the path that a reader opens.

    Raises ConfigError without huggingface_hub, ModelNotFound for an unknown repository or file,
    UnsupportedModel when it holds nothing we read, DownloadFailed when the fetch broke.
    """
    with _translated(repository):
        from huggingface_hub import HfApi

        info = HfApi().model_info(repository.hub_id, files_metadata=True)
    chosen = _choose(repository, info.siblings or [])
    with store.workspace(needed_bytes=_total_size(chosen)) as workspace:
        arrived = workspace / "repository"
        _download(repository, info.sha, chosen, arrived, progress)
        if len(chosen) == 1 and (file := chosen[0].rfilename).endswith(".gguf"):
            return store.place(arrived / file, repository.gguf(file))
        return store.place(arrived, repository.checkpoint)


def _hub_dir() -> Path:
    return store.models_dir() / "hub"


def _choose(repository: Repository, files: Sequence["RepoSibling"]) -> list["RepoSibling"]:
    """The files worth fetching, by the rule at the top of this module."""
    companions = [
        file for file in files if "/" not in file.rfilename and file.rfilename.endswith(_COMPANIONS)
    ]
    weights = [
        file for file in files if "/" not in file.rfilename and file.rfilename.endswith(".safetensors")
    ]
    ggufs = [file for file in files if file.rfilename.endswith(".gguf")]
    if repository.file is not None:
        return _named(repository, ggufs)
    if weights:
        return weights + companions
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        names = ", ".join(file.rfilename for file in ggufs)
        raise ModelNotFound(
            f"{repository.hub_id} holds several GGUF files; name one as {repository.hub_id}/FILE: {names}"
        )
    raise UnsupportedModel(f"{repository.hub_id} holds neither safetensors nor GGUF files at its top")


def _named(repository: Repository, ggufs: Sequence["RepoSibling"]) -> list["RepoSibling"]:
    found = [file for file in ggufs if file.rfilename == repository.file]
    if not found:
        names = ", ".join(file.rfilename for file in ggufs) or "none"
        raise ModelNotFound(f"{repository.hub_id} has no file {repository.file}; its GGUF files: {names}")
    return found


def _download(
    repository: Repository,
    revision: str | None,
    chosen: Sequence["RepoSibling"],
    folder: Path,
    progress: Progress,
) -> None:
    """Fetch the chosen files into `folder` and check the digests the hub knows."""
    step = f"fetching {repository.hub_id}"
    with _translated(repository), store.growth_reported(folder, step, _total_size(chosen) or None, progress):
        from huggingface_hub import snapshot_download

        patterns = [_literally(file.rfilename) for file in chosen]
        snapshot_download(repository.hub_id, revision=revision, local_dir=folder, allow_patterns=patterns)
    # The library's own notes about what it fetched into this folder: of no use once it is renamed.
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    for file in chosen:
        _check(folder / PurePosixPath(file.rfilename), file, progress)


def _total_size(files: Sequence["RepoSibling"]) -> int:
    return sum(file.size or 0 for file in files)


def _literally(name: str) -> str:
    """A pattern that matches exactly this name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _check(path: Path, file: "RepoSibling", progress: Progress) -> None:
    if not path.is_file():
        raise DownloadFailed(f"the hub did not send {file.rfilename}")
    if file.lfs is not None:
        store.check_file(path, file.lfs.size, file.lfs.sha256, progress)


@contextmanager
def _translated(repository: Repository) -> Iterator[None]:
    """Turn what huggingface_hub raises into our errors, and keep its own progress bars off the screen."""
    try:
        from huggingface_hub import errors
        from huggingface_hub.utils.tqdm import (
            are_progress_bars_disabled,
            disable_progress_bars,
            enable_progress_bars,
        )
    except ImportError as error:
        raise ConfigError(
            f"{repository.hub_id} is a hub id, which needs huggingface_hub: pip install 'kakeya[hub]'"
        ) from error
    quiet_already = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{repository.hub_id} is gated: accept its terms on its page, then log in with `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFound(f"the hub has no model {repository.hub_id} (or it is private)") from error
    except Exception as error:
        # Network errors come from whichever HTTP library the installed version stands on.
        if _is_about_the_disk(error):
            raise
        raise DownloadFailed(f"{repository.hub_id} could not be fetched from the hub: {error}") from error
    finally:
        if not quiet_already:
            enable_progress_bars()


def _is_about_the_disk(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError)

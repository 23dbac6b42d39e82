"""Checkpoints by hub id: `org/name`, `org/name:QUANT`, or `org/name/file.gguf` for one file of a repository.

Needs the optional package huggingface_hub (`pip install 'kakeya[hub]'`). Of a repository with safetensors
the JSON files and the weights that a reader opens are fetched; of one without, the GGUF model of the quant
that is named, or of the first usual one (`gguf_names.PREFERRED`). A broken download goes on where it broke.
The digests that the hub knows are checked and kept beside what was fetched, so that `pull` can check it again
without the hub.
What the user has in the hub's own cache is used from there.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from kakeya.errors import ConfigError, CorruptCheckpoint, DownloadFailed, ModelNotFound, UnsupportedModel
from kakeya.models import gguf_names, store
from kakeya.models.gguf_names import GgufModel
from kakeya.models.store import Progress

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_their_log = logging.getLogger("huggingface_hub")

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_ID = re.compile(rf"({_PART})/({_PART})(?:/(.+\.gguf)|:({_PART}))?")
_SEPARATOR = "--"
_COMPANIONS = (".json", ".jinja")
_SAFETENSORS, _WHOLE = ".safetensors", "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Repository:
    """A repository of the hub, or one GGUF model in it, named by its file or by its quant."""

    owner: str
    name: str
    file: str | None = None
    quant: str | None = None

    @property
    def hub_id(self) -> str:
        return f"{self.owner}/{self.name}"

    def __str__(self) -> str:
        return self.hub_id + (f"/{self.file}" if self.file else f":{self.quant}" if self.quant else "")

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
        """Where the model is, if it was fetched before, by us or into the hub's own cache. For `org/name`
        alone it is what would be chosen."""
        own = self._among(self.gguf(""), self.checkpoint if self.checkpoint.is_dir() else None)
        if own is not None or (snapshot := _snapshot(self.hub_id)) is None:
            return own
        return self._among(snapshot, snapshot if _is_whole_checkpoint(snapshot) else None)

    def _among(self, root: Path, checkpoint: Path | None) -> Path | None:
        """What is named, of a checkpoint of safetensors and the GGUF models under `root`."""
        if self.file is None and self.quant is None and checkpoint is not None:
            return checkpoint
        models = _models_under(root)
        if self.file is not None:
            found = [model for model in models if self.file in model.files]
        else:
            found = gguf_names.matching(models, self.quant)
        return root / found[0].first if len(found) == 1 else None

    def is_whole(self, progress: Progress) -> bool:
        """Whether what was fetched still has the digests that the hub stated. If not, damaged files are
        deleted and the others are kept for the next fetch. Files in the hub's own cache are left alone: the
        next fetch brings the model into ours."""
        path = self.fetched_path()
        assert path is not None, "only what was fetched can be damaged"
        is_ours = path.is_relative_to(self.folder)
        if is_ours:
            digests = _stated_digests(path, self.checkpoint if path == self.checkpoint else self.gguf(""))
        else:
            digests = _blob_digests(path)
        damaged = [file for file, sha256 in digests.items() if not store.still_has(file, sha256, progress)]
        if damaged and is_ours:
            self._take_apart(path, digests, damaged)
        return not damaged

    def _take_apart(self, path: Path, digests: Mapping[Path, str], damaged: Sequence[Path]) -> None:
        for file, sha256 in digests.items():
            if file in damaged:
                file.unlink()
            else:
                store.place(file, store.partial_path(sha256))
        if path == self.checkpoint:
            shutil.rmtree(path)

    def fetch(self, progress: Progress) -> Path:
        """Fetch into the cache and return the path that a reader opens.

        Raises ConfigError without huggingface_hub, ModelNotFound for an unknown repository, file or quant,
        UnsupportedModel when it holds nothing we read, where that can be known before the weights are
        fetched, DownloadFailed when the fetch broke.
        """
        with _translated(self):
            from huggingface_hub import HfApi

            info = HfApi().model_info(self.hub_id, files_metadata=True)
        chosen = _choose(self, info.siblings or [])
        if not chosen[0].rfilename.endswith(_SAFETENSORS):
            _refuse_gguf(self, info.gguf)
        return _fetch(self, info.sha, chosen, progress)


@dataclass(frozen=True)
class Fetched:
    """Something in the cache that came from the hub, and the name it is called by."""

    name: str
    path: Path
    size: int


def parse(name: str) -> Repository | None:
    """The repository a name means, or None when it cannot be a hub id."""
    match = _HUB_ID.fullmatch(name)
    return Repository(match[1], match[2], match[3], match[4]) if match else None


def fetched_checkpoints() -> list[Fetched]:
    """Everything in the cache that came from the hub."""
    found = []
    for folder in sorted(_hub_dir().glob(f"*{_SEPARATOR}*")):
        repository = Repository(*folder.name.split(_SEPARATOR, 1))
        if repository.checkpoint.is_dir():
            size = store.bytes_under(repository.checkpoint)
            found.append(Fetched(repository.hub_id, repository.checkpoint, size))
        models = _models_under(repository.gguf(""))
        quants = [model.quant for model in models]
        for model in models:
            unique = model.quant is not None and quants.count(model.quant) == 1
            name = f"{repository.hub_id}:{model.quant}" if unique else f"{repository.hub_id}/{model.first}"
            size = sum(store.bytes_under(repository.gguf(file)) for file in model.files)
            found.append(Fetched(name, repository.gguf(model.first), size))
    return found


def _hub_dir() -> Path:
    return store.models_dir() / "hub"


def _models_under(root: Path) -> list[GgufModel]:
    """The GGUF models in a folder that have all their parts."""
    files = (path.relative_to(root).as_posix() for path in root.rglob(f"*{gguf_names.SUFFIX}"))
    return [model for model in gguf_names.models_in(files) if not model.missing]


def _snapshot(hub_id: str) -> Path | None:
    """The folder of this repository in the hub's own cache, which may have some of its files or all."""
    try:
        from huggingface_hub import snapshot_download

        # No pattern, no file that must be there: the library then says where the folder is.
        return Path(snapshot_download(hub_id, local_files_only=True, allow_patterns=[]))
    except (
        ImportError,
        OSError,
        ValueError,
    ):  # no library, no such folder, a name that the hub does not take
        return None


def _is_whole_checkpoint(folder: Path) -> bool:
    """Whether every file is there that a reader needs. Someone may have fetched the tokenizer alone."""
    needed = {"config.json", "tokenizer.json", "tokenizer_config.json"}
    try:
        needed |= _indexed(folder / _INDEX) or {_WHOLE}
        return all((folder / name).is_file() for name in needed)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False


def _indexed(index: Path) -> set[str]:
    """The files of weights that an index names; none where there is no index. Raises for a damaged one."""
    return set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else set()


def _blob_digests(path: Path) -> dict[Path, str]:
    """The digest of each large file of a model in the hub's own cache, where links lead to files named by
    their digest."""
    part = gguf_names.part_name(path.name)
    if path.is_dir():
        files = list(path.glob("*.safetensors"))
    else:
        files = [path] if part is None else [path.with_name(name) for name in part.siblings]
    blobs = {file: file.resolve().name for file in files}
    return {file: name for file, name in blobs.items() if _SHA256.fullmatch(name)}


def _choose(repository: Repository, files: Sequence["RepoSibling"]) -> list["RepoSibling"]:
    """The files worth fetching, by the rule at the top of this module."""
    top = [file for file in files if "/" not in file.rfilename]
    weights = [file for file in top if file.rfilename.endswith(_SAFETENSORS)]
    if weights and repository.file is None and repository.quant is None:
        return weights + [file for file in top if file.rfilename.endswith(_COMPANIONS)]
    models = gguf_names.models_in(file.rfilename for file in files)
    model = _named(repository, models)
    by_name = {file.rfilename: file for file in files}
    return [by_name[name] for name in model.files]


def _named(repository: Repository, models: Sequence[GgufModel]) -> GgufModel:
    if repository.file is None:
        if not models and repository.quant is None:
            raise UnsupportedModel(f"{repository.hub_id} holds neither safetensors at its top nor GGUF files")
        return gguf_names.choose(models, repository.quant, repository.hub_id)
    found = [model for model in models if repository.file in model.files]
    if not found:
        names = ", ".join(name for model in models for name in model.files) or "none"
        raise ModelNotFound(f"{repository.hub_id} has no file {repository.file}; its GGUF files: {names}")
    return gguf_names.choose(found, None, repository.hub_id)


def _fetch(
    repository: Repository, revision: str | None, chosen: Sequence["RepoSibling"], progress: Progress
) -> Path:
    """Gather every file, check it, and only then put them into place. What is beside weights comes first:
    it says whether they can be read, and which of them."""
    with store.workspace() as workspace:
        gathered: dict[str, Path] = {}

        def gather(files: Sequence["RepoSibling"]) -> None:
            for file in files:
                gathered[file.rfilename] = _gather(repository, revision, file, workspace, progress)

        gather([file for file in chosen if file.rfilename.endswith(_COMPANIONS)])
        _refuse_network(repository, gathered.get("config.json"))
        gather(_weights_needed(chosen, gathered.get(_INDEX)))
        digests = "".join(
            f"{file.lfs.sha256}  {file.rfilename}\n"
            for file in chosen
            if file.lfs is not None and file.rfilename in gathered
        )
        first = chosen[0].rfilename
        is_gguf = first.endswith(gguf_names.SUFFIX)
        target = repository.gguf(first) if is_gguf else repository.checkpoint
        (workspace / "digests").write_text(digests)
        store.place(workspace / "digests", _digests_of(target))
        if is_gguf:
            for name, path in gathered.items():
                store.place(path, repository.gguf(name))
            return target
        arrived = workspace / "checkpoint"
        for name, path in gathered.items():
            store.place(path, arrived / name)
        return store.place(arrived, target)


def _refuse_gguf(repository: Repository, described: Mapping[str, Any] | None) -> None:
    """Raises UnsupportedModel where the hub tells an architecture that is known not to run. It tells that of
    one file, which may be a companion: so what is only unknown is left to the reader."""
    from kakeya.models.config import unsupported_architecture, why_unsupported  # imports torch

    architecture = (described or {}).get("architecture")
    if isinstance(architecture, str) and why_unsupported(architecture) is not None:
        raise UnsupportedModel(f"{repository.hub_id}: {unsupported_architecture(architecture)}")


def _refuse_network(repository: Repository, config: Path | None) -> None:
    """Raises UnsupportedModel for a network that is refused. What is damaged is the reader's to tell."""
    if config is None:
        return
    from kakeya.models.hf_config import config_from_hf  # imports torch

    try:
        config_from_hf(json.loads(config.read_text()))
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{repository.hub_id}: {error}") from error
    except (CorruptCheckpoint, ValueError, AttributeError, RecursionError):
        return


def _weights_needed(chosen: Sequence["RepoSibling"], index: Path | None) -> list["RepoSibling"]:
    """The files of weights that a reader opens. Beside them some have the same weights in another layout."""
    weights = [file for file in chosen if not file.rfilename.endswith(_COMPANIONS)]
    try:
        needed = set() if index is None else _indexed(index)
    except (ValueError, LookupError, TypeError, AttributeError):
        return weights
    return [file for file in weights if file.rfilename in (needed or {_WHOLE})] or weights


def _gather(
    repository: Repository, revision: str | None, file: "RepoSibling", workspace: Path, progress: Progress
) -> Path:
    """Fetch a file; where it lies. A large one continues a broken fetch, and its digest is checked."""
    name = file.rfilename
    if file.lfs is None:  # a few kilobytes, of which the hub states no SHA-256
        path = workspace / "small" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as small:
            _download(repository, revision, name, small, file.size, progress)
        return path
    size, sha256 = file.lfs.size, file.lfs.sha256
    path = store.partial_path(sha256)
    with store.partial(sha256, size) as large:
        try:
            _download(repository, revision, name, large, size, progress)
        except DownloadFailed as error:
            kept = f"{large.tell():,} of {size:,} bytes are here, and the next fetch goes on from there"
            raise DownloadFailed(f"{error}; {kept}") from error
        store.settle(large)
        try:
            store.check_file(path, size, sha256, progress, name)
        except DownloadFailed as error:
            path.unlink()
            raise DownloadFailed(f"{error}; what arrived was deleted") from error
    return path


def _download(
    repository: Repository,
    revision: str | None,
    name: str,
    file: BinaryIO,
    size: int | None,
    progress: Progress,
) -> None:
    """Let the library write the missing rest of a file, over as many connections as that takes."""
    step = f"fetching {name}"
    with _translated(repository), store.growth_reported(Path(file.name), step, size, progress):
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        url = hf_hub_url(repository.hub_id, name, revision=revision)
        http_get(url, file, resume_size=file.tell(), headers=build_hf_headers(), expected_size=size)


def _digests_of(path: Path) -> Path:
    """Where the digests of what was fetched to `path` are kept, as sha256sum writes them."""
    return path.with_name(f"{path.name}.sha256")


def _stated_digests(path: Path, root: Path) -> dict[Path, str]:
    """The digest of each large file that was fetched to `path`. The record's names are relative to `root`."""
    record = _digests_of(path)
    if not record.is_file():  # fetched before records were kept
        return {}
    lines = (line.split("  ", 1) for line in record.read_text().splitlines())
    return {root / name: sha256 for sha256, name in lines}


@contextmanager
def _translated(repository: Repository) -> Iterator[None]:
    """Turn what huggingface_hub raises into our errors, and keep its bars and warnings off the screen."""
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
    quiet_already, verbosity = are_progress_bars_disabled(), _their_log.level
    disable_progress_bars()
    _their_log.setLevel(logging.ERROR)
    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelNotFound(
            f"{repository.hub_id} is gated: accept its terms on its page, then log in with `hf auth login`"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ModelNotFound(
            f"the hub has no model {repository.hub_id}, or it is private: then log in with `hf auth login`"
        ) from error
    except Exception as error:
        # Network errors come from whichever HTTP library the installed version stands on.
        if _is_about_the_disk(error):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DownloadFailed(f"{repository.hub_id} could not be fetched from the hub: {reason}") from error
    finally:
        _their_log.setLevel(verbosity)
        if not quiet_already:
            enable_progress_bars()


def _is_about_the_disk(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError)

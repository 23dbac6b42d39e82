"""The one door from what a user writes to a path, `resolve`, and the list of what there is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from kakeya.config import DEFAULT_MODEL, EngineConfig
from kakeya.errors import DownloadFailed, ModelNotFound
from kakeya.models import fitting, gguf_names, hub
from kakeya.models.known_models import CATALOGUE, CatalogueEntry
from kakeya.models.store import Progress, silent

__all__ = ["CATALOGUE", "CatalogueEntry", "ModelListing", "list_models", "pull", "quant_taken", "resolve"]


class Source(Protocol):
    """Where a model comes from."""

    def fetched_path(self) -> Path | None:
        """Where it is, if it is in the cache."""

    def is_whole(self, progress: Progress) -> bool:
        """Whether what is in the cache still has its digests. May raise OSError."""

    def fetch(self, progress: Progress) -> Path:
        """Put it into the cache, in place of what was there. Raises ModelError."""


@dataclass(frozen=True)
class ModelListing:
    """One line of `kakeya models`. `path` is None until the model is fetched. Only models of the catalogue
    have an `entry`."""

    name: str
    description: str
    licence: str
    size: int
    path: Path | None
    entry: CatalogueEntry | None = None


def resolve(name: str, progress: Progress = silent, config: EngineConfig | None = None) -> Path:
    """The local file or folder that `name` means: a catalogue name, a path, DIR:QUANT or a hub id.

    What is not here yet is fetched. What is here is used without the network.
    Raises ModelNotFound when nothing matches, DownloadFailed when the fetch broke, and ConfigError when a
    model of the catalogue needs more memory than is free, with the window and formats of `config`.
    """
    if (path := _local_path(name)) is not None:
        return path
    source = _source_of(name, config)
    return source.fetched_path() or source.fetch(progress)


def pull(name: str = DEFAULT_MODEL, progress: Progress = silent) -> Path:
    """Fetch `name` into the cache. If it is there already, check its digests again."""
    if (path := _local_path(name)) is not None:
        return path
    source = _source_of(name, None)
    if (path := source.fetched_path()) is None:
        return source.fetch(progress)
    try:
        whole = source.is_whole(progress)
    except OSError as error:
        raise DownloadFailed(f"{error.filename or path} cannot be read: {error.strerror}") from error
    return path if whole else source.fetch(progress)


def quant_taken(name: str, path: Path) -> str | None:
    """The quant that was chosen for a bare `org/name`; None where there was no choice."""
    repository = hub.parse(name)
    if repository is None or str(repository) != repository.hub_id or path != repository.fetched_path():
        return None
    return gguf_names.quant_of(path.name) if path.suffix == gguf_names.SUFFIX else None


def list_models() -> list[ModelListing]:
    """The catalogue, then what else was fetched from a hub."""
    known = [
        ModelListing(each.name, each.description, each.licence, each.size, each.source.fetched_path(), each)
        for each in CATALOGUE.values()
    ]
    here = {listing.path for listing in known}
    fetched = [
        ModelListing(each.name, "fetched from the hub", "see its page", each.size, each.path)
        for each in hub.fetched_checkpoints()
        if each.path not in here
    ]
    return known + fetched


def _local_path(name: str) -> Path | None:
    """The path that a name is, or the model of a quant in a directory: DIR:QUANT."""
    if not name or name in CATALOGUE:
        return None
    if (path := Path(name).expanduser()).exists():
        return path
    before, colon, quant = name.rpartition(":")
    if not colon or not before or not (directory := Path(before).expanduser()).is_dir():
        return None
    models = gguf_names.models_in(file.name for file in directory.iterdir())
    return directory / gguf_names.choose(models, quant, before).first


def _source_of(name: str, config: EngineConfig | None) -> Source:
    """Where the model comes from. Raises ConfigError for one of the catalogue that does not fit here."""
    if (entry := CATALOGUE.get(name)) is not None:
        config = config or EngineConfig()
        fitting.check_fits(name, entry.memory_need(config), config)
        return entry.source
    if (repository := hub.parse(name)) is not None:
        return repository
    raise ModelNotFound(_no_such_model(name))


def _no_such_model(name: str) -> str:
    known = ", ".join(sorted(CATALOGUE))
    return (
        f"no model {name!r}: it is not a name of the catalogue ({known}), "
        "not an existing file or directory, and not a hub id such as org/name or org/name:Q4_K_M"
    )

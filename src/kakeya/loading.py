"""Loads a model: from a name, a path or an opened checkpoint to what a runtime runs on."""

import ctypes
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kakeya.config import EngineConfig
from kakeya.engine.backend import Backend
from kakeya.engine.backends import OpenedBackend, chosen_backend, open_backend
from kakeya.models.catalogue import resolve
from kakeya.models.checkpoint import Checkpoint, open_checkpoint
from kakeya.models.config import ModelConfig
from kakeya.models.drafter import StoredDrafter
from kakeya.text import Tokenizer
from kakeya.types import RuntimeFacts

# find_drafter(checkpoint, config, name of the model)
FindDrafter = Callable[[Checkpoint, EngineConfig, str], StoredDrafter | None]


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, its tokenizer, and what there is to say about them."""

    backend: Backend
    tokenizer: Tokenizer
    model_config: ModelConfig
    config: EngineConfig
    """With its backend chosen, and what depends on it."""
    facts: RuntimeFacts
    fingerprint: str
    """Of the checkpoint, whatever its weights are held as."""


def load_model(
    model: str | Checkpoint,
    config: EngineConfig,
    name: str = "",
    tokenizer: Tokenizer | None = None,
    observed_layers: int = 0,
    find_drafter: FindDrafter = lambda checkpoint, config, name: None,
) -> LoadedModel:
    """Load a catalogue name, a path, a hub id or an opened checkpoint. What is not here yet is fetched first.

    `name` is what a checkpoint is called. Its own `tokenizer` is used unless another is given. A proposer is
    shown the outputs of `observed_layers` layers. `find_drafter` says which drafter runs inside the backend,
    if any. Raises ModelError, and ConfigError for a model that does
    not fit in memory.
    """
    if isinstance(model, str):
        name, model = name or model, open_checkpoint(resolve(model, config=config))
    tokenizer = tokenizer or Tokenizer(model.tokenizer_files())
    config = chosen_backend(config)
    opened = open_backend(model, config, observed_layers, find_drafter(model, config, name))
    config = config.cut_by(any_cut=opened.backend.any_cut)
    model_config, facts = model.config, _facts(opened, model, config, name)
    fingerprint = model.fingerprint
    del model  # frees its vocabulary of Python strings, unless the caller keeps it
    give_back_memory()
    return LoadedModel(opened.backend, tokenizer, model_config, config, facts, fingerprint)


def give_back_memory() -> None:
    """Return to the system what loading has freed: glibc keeps hundreds of megabytes of it otherwise."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _facts(opened: OpenedBackend, checkpoint: Checkpoint, config: EngineConfig, name: str) -> RuntimeFacts:
    pool = opened.backend.pool
    return RuntimeFacts(
        model=name,
        path=str(checkpoint.path),
        family=checkpoint.config.family,
        parameters=opened.parameters,
        weights=opened.weights,
        dtype=config.dtype.value,
        numerics=config.numerics.value,
        kernels=opened.kernels,
        threads=config.threads,
        sink=config.cache.sink,
        window=config.cache.window,
        capacity=config.capacity,
        bytes_per_token=pool.geometry.bytes_per_token,
        session_bytes=pool.geometry.slab_bytes,
        pool_bytes=pool.storage.nbytes,
        backend=config.backend.value,
        share_beginnings=config.share_beginnings.value,
        prefix_cache_bytes=pool.granules.nbytes,
        recall=config.cache.recall,
        recall_bytes=pool.undo.nbytes,
    )

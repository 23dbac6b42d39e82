"""Opens the proposers that a configuration asks for."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kakeya import kernels as native
from kakeya.config import DRAFTER, MODEL, NO_PROPOSER, REMOTE, EngineConfig, ProposerChoice
from kakeya.engine.backends import held_bytes
from kakeya.engine.cpu.backend import CpuBackend
from kakeya.engine.cuda.memory import device_memory
from kakeya.engine.proposer import Proposer
from kakeya.engine.slab import slab_geometry
from kakeya.errors import ConfigError
from kakeya.loading import LoadedModel, load_model
from kakeya.models.catalogue import resolve
from kakeya.models.checkpoint import Checkpoint, open_checkpoint
from kakeya.models.config import ModelConfig
from kakeya.models.drafter import DrafterConfig, StoredDrafter, read_drafter
from kakeya.models.float_types import FLOAT_TYPES
from kakeya.models.quantized import GROUP
from kakeya.proposers.draft_states import state_bytes
from kakeya.proposers.drafter import TrainedDrafter, Verifier
from kakeya.proposers.model import COMMON_TOKENS, SmallModel
from kakeya.proposers.ngram import LookUp
from kakeya.proposers.shipped import shipped_drafter
from kakeya.types import BackendChoice, ShareBeginnings

log = logging.getLogger(__name__)


def open_proposers(model: LoadedModel) -> tuple[LoadedModel, Sequence[Proposer]]:
    """The proposers for a loaded model, and the model with what there is to say about them.

    Raises ModelError, and ConfigError for a small model with another tokenizer or without room in memory, and
    for a drafter where the package has none or the backend runs none, and for a remote proposer that does not
    fit. One that does not answer is tried again in the background.
    """
    proposers: list[Proposer] = []
    facts, config = model.facts, model.config
    for choice in config.proposers:
        if choice.kind == MODEL:
            small = _open_small_model(choice, model)
            facts = replace(facts, proposer_bytes=facts.proposer_bytes + small.facts.pool_bytes)
            proposers.append(SmallModel(small.backend, config.draft_tokens))
        elif choice.kind == REMOTE:
            proposers.append(_open_remote(choice, model))
        elif choice.kind == DRAFTER and not isinstance(model.backend, Verifier):
            continue  # it runs inside the backend
        elif choice.kind == DRAFTER:
            drafter = _open_drafter(choice, model)
            facts = replace(facts, proposer_bytes=facts.proposer_bytes + drafter.memory.nbytes)
            proposers.append(drafter)
        else:
            proposers.append(LookUp(config.draft_tokens))
    if config.proposers:
        names = "+".join(map(str, config.proposers))
        facts = replace(facts, proposer=names, draft_tokens=config.draft_tokens)
    return replace(model, facts=facts), proposers


def proposer_memory(config: EngineConfig, verifier: Checkpoint | None, name: str) -> tuple[int, int]:
    """Bytes that proposers take beside the backend: for their weights and what does not grow with the
    sessions, and for each session. The backend must be chosen, and on a device the capacity: buffers grow
    with it. A drafter that the device runs by itself is a part of its backend.

    Raises ConfigError for proposers that need the `verifier` where there is none.
    """
    weights, each = 0, 0
    for choice in config.proposers:
        if choice.kind == MODEL:
            checkpoint = open_checkpoint(resolve(choice.path, config=config))
            weights += _small_model_memory(checkpoint, small_config(config))
            each += slab_geometry(checkpoint.config, config).slab_bytes
        elif choice.kind == DRAFTER:
            if verifier is None:
                raise needs_verifier(choice)
            if config.backend is not BackendChoice.CUDA:
                stored = stored_drafter(choice, verifier.config, verifier.fingerprint, name)
                weights += _drafter_weights(stored, config)
                each += state_bytes(stored.config, config)
    return weights, each


def _drafter_weights(stored: StoredDrafter, config: EngineConfig) -> int:
    """Bytes with its rows of the verifier's head: in 8 bits where native kernels multiply."""
    shape, count = stored.config, sum(tensor.numel() for tensor in stored.tensors.values())
    if shape.draft_vocab_size < shape.vocab_size:
        count += shape.draft_vocab_size * shape.hidden_size
    is_native = native.load(config.kernels) is not None and shape.hidden_size % GROUP == 0
    return count if is_native else count * FLOAT_TYPES[config.dtype].itemsize


def _small_model_memory(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """On a device it has buffers and graphs of its own, and checks before it is loaded that they fit."""
    if config.backend is BackendChoice.CUDA:
        return device_memory(checkpoint.config, config).total
    return held_bytes(checkpoint, config)


def device_drafter(checkpoint: Checkpoint, config: EngineConfig, name: str) -> StoredDrafter | None:
    """The drafter that a CUDA backend runs by itself, if the configuration asks for one.

    Raises ModelError, and ConfigError for one that it cannot run.
    """
    stored = _drafter_on_device(checkpoint, config, name)
    if stored is not None:
        choice = _drafter_of(config)
        assert choice is not None
        _warn_of_other_weights(stored, choice, checkpoint.fingerprint, name)
    return stored


def device_drafter_shape(checkpoint: Checkpoint, config: EngineConfig, name: str) -> DrafterConfig | None:
    """What the plan of a device's memory needs to know of it. Raises as `device_drafter` does."""
    stored = _drafter_on_device(checkpoint, config, name)
    return stored.config if stored is not None else None


def _drafter_on_device(checkpoint: Checkpoint, config: EngineConfig, name: str) -> StoredDrafter | None:
    choice = _drafter_of(config)
    if choice is None or config.backend is not BackendChoice.CUDA:
        return None
    stored = stored_drafter(choice, checkpoint.config, checkpoint.fingerprint, name)
    if stored.config.kind != "steps":
        raise ConfigError(f"{choice} fills blocks, which cuda does not run; train one with --kind steps")
    return stored


def _drafter_of(config: EngineConfig) -> ProposerChoice | None:
    return next((choice for choice in config.proposers if choice.kind == DRAFTER), None)


def _warn_of_other_weights(
    stored: StoredDrafter, choice: ProposerChoice, fingerprint: str, name: str
) -> None:
    if stored.config.verifier != fingerprint:
        log.warning("%s was trained for other weights than those of %s: it may seldom be right", choice, name)


def _open_drafter(choice: ProposerChoice, verifier: LoadedModel) -> TrainedDrafter:
    """The drafter as the verifier's backend runs it."""
    name, config, backend = verifier.facts.model, verifier.config, verifier.backend
    assert isinstance(backend, Verifier)
    stored = stored_drafter(choice, verifier.model_config, verifier.fingerprint, name)
    _warn_of_other_weights(stored, choice, verifier.fingerprint, name)
    return TrainedDrafter(stored, backend, verifier.model_config, config, native.load(config.kernels))


def stored_drafter(choice: ProposerChoice, model: ModelConfig, fingerprint: str, name: str) -> StoredDrafter:
    """The drafter that a choice names, or the package's own for a checkpoint of this fingerprint.

    Raises ModelError, and ConfigError where the package has none for the model called `name`.
    """
    path = Path(choice.path) if choice.path else shipped_drafter(fingerprint)
    if path is None:
        raise ConfigError(
            f"no drafter for {name} comes with the package: train one with `kakeya train drafter`, and say "
            "where it is with --proposer drafter:PATH"
        )
    stored = read_drafter(path)
    stored.config.check_fits(model)
    return stored


def load_small_model(choice: ProposerChoice, config: EngineConfig) -> LoadedModel:
    """A model that guesses: among common tokens alone, where its head can be cut."""
    small = load_model(choice.path, small_config(config))
    if isinstance(small.backend, CpuBackend):
        small.backend.shorten_head(COMMON_TOKENS)
    return small


def _open_small_model(choice: ProposerChoice, verifier: LoadedModel) -> LoadedModel:
    small = load_small_model(choice, verifier.config)
    if not small.tokenizer.has_ids_of(verifier.tokenizer):
        raise ConfigError(
            f"{choice} cannot guess for {verifier.facts.model}: their tokenizers differ, "
            "so the same ids stand for other texts"
        )
    return small


def _open_remote(choice: ProposerChoice, model: LoadedModel) -> Proposer:
    # Who calls nobody needs no gRPC.
    from kakeya.proposers.peers import Peers, Verifier
    from kakeya.proposers.remote import RemoteProposer

    backend, config = model.backend, model.config
    verifier = Verifier(model.facts.model, model.tokenizer.ids_digest, model.fingerprint)
    peers = Peers(choice.addresses(), verifier, config.calling)
    return RemoteProposer(peers, backend.vocab_size, config.draft_tokens, config.draft_ahead)


def needs_verifier(choice: ProposerChoice) -> ConfigError:
    return ConfigError(f"{choice} shares weights with the model that it guesses for: name that by --model")


def small_config(config: EngineConfig) -> EngineConfig:
    """For a model that guesses: it recalls nothing, and its window is longer by what the verifier may."""
    cache = replace(config.cache, window=config.cache.window + config.cache.recall, recall=0)
    return replace(
        config,
        cache=cache,
        share_beginnings=ShareBeginnings.OFF,
        prefix_cache_bytes=None,
        proposer=NO_PROPOSER,
    )

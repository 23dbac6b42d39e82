"""Opens the proposers that a configuration asks for."""

from collections.abc import Sequence
from dataclasses import replace

from kakeya.config import MODEL, NO_PROPOSER, EngineConfig, ProposerChoice
from kakeya.engine.backends import held_bytes
from kakeya.engine.proposer import Proposer
from kakeya.engine.slab import slab_geometry
from kakeya.errors import ConfigError
from kakeya.loading import LoadedModel, load_model
from kakeya.models.catalogue import resolve
from kakeya.models.checkpoint import open_checkpoint
from kakeya.proposers.model import SmallModel
from kakeya.proposers.ngram import LookUp
from kakeya.types import ShareBeginnings


def open_proposers(model: LoadedModel) -> tuple[LoadedModel, Sequence[Proposer]]:
    """The proposers for a loaded model, and the model with what there is to say about them.

    Raises ModelError, and ConfigError for a small model with another tokenizer or without room in memory.
    """
    proposers: list[Proposer] = []
    facts, config = model.facts, model.config
    for choice in config.proposers:
        if choice.kind == MODEL:
            small = _open_small_model(choice, model)
            facts = replace(facts, proposer_bytes=small.facts.pool_bytes)
            proposers.append(SmallModel(small.backend, config.draft_tokens))
        else:
            proposers.append(LookUp(config.draft_tokens))
    if proposers:
        names = "+".join(map(str, config.proposers))
        facts = replace(facts, proposer=names, draft_tokens=config.draft_tokens)
    return replace(model, facts=facts), proposers


def proposer_memory(config: EngineConfig) -> tuple[int, int]:
    """Bytes that a small model takes: for its weights, and for each session. Its backend must be chosen."""
    for choice in config.proposers:
        if choice.kind == MODEL:
            checkpoint = open_checkpoint(resolve(choice.path, config=config))
            geometry = slab_geometry(checkpoint.config, config)
            return held_bytes(checkpoint, config), geometry.slab_bytes
    return 0, 0


def _open_small_model(choice: ProposerChoice, verifier: LoadedModel) -> LoadedModel:
    small = load_model(choice.path, _small_config(verifier.config))
    if not small.tokenizer.has_ids_of(verifier.tokenizer):
        raise ConfigError(
            f"{choice} cannot guess for {verifier.facts.model}: their tokenizers differ, "
            "so the same ids stand for other texts"
        )
    return small


def _small_config(config: EngineConfig) -> EngineConfig:
    return replace(
        config, share_beginnings=ShareBeginnings.OFF, prefix_cache_bytes=None, proposer=NO_PROPOSER
    )

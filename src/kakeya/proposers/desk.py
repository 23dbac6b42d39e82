"""Opens proposers that guess for verifiers elsewhere."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kakeya.config import DRAFTER, MODEL, REMOTE, EngineConfig
from kakeya.engine.proposer import Proposer
from kakeya.errors import ConfigError
from kakeya.loading import LoadedModel
from kakeya.proposers.blocks import Desk
from kakeya.proposers.model import SmallModel
from kakeya.proposers.ngram import LookUp
from kakeya.proposers.opening import load_small_model, needs_verifier, open_proposers

_ANY_VOCABULARY = 2**31
_READ_AT_ONCE = 128  # tokens of histories that a small model reads between two blocks for others


def open_desk(config: EngineConfig, verifier: LoadedModel | None = None) -> Desk:
    """The proposers of a configuration, to guess for verifiers elsewhere.

    Where they share weights with the `verifier`, they need it. Raises ModelError and ConfigError.
    """
    config = desk_config(config)
    if verifier is not None:
        model, proposers = open_proposers(replace(verifier, config=config))
        if len(proposers) < len(config.proposers):
            raise ConfigError(f"{config.proposer} guesses elsewhere on a CPU only; choose --backend cpu")
        wants_hidden = any(proposer.hidden_layers for proposer in proposers)
        return _desk(
            config,
            proposers,
            model.backend.vocab_size,
            model.tokenizer.ids_digest,
            verifier_fingerprint=model.fingerprint if wants_hidden else "",
            held_bytes=model.facts.proposer_bytes,
        )
    proposers, small = [], None
    for choice in config.proposers:
        if choice.kind == MODEL:
            small = load_small_model(choice, config)
            proposers.append(SmallModel(small.backend, config.draft_tokens, _READ_AT_ONCE))
        elif choice.kind == DRAFTER:
            raise needs_verifier(choice)
        else:
            proposers.append(LookUp(config.draft_tokens))
    if small is None:
        return _desk(config, proposers, _ANY_VOCABULARY, "")
    return _desk(
        config,
        proposers,
        small.model_config.vocab_size,
        small.tokenizer.ids_digest,
        model_fingerprint=small.backend.fingerprint,
        held_bytes=small.facts.pool_bytes,
    )


def desk_config(config: EngineConfig) -> EngineConfig:
    """With slots for what is guessed ahead: a proposer must be able to go back over all of it.

    Raises ConfigError for proposers that cannot guess for somebody else.
    """
    kinds = [choice.kind for choice in config.proposers]
    if not kinds or REMOTE in kinds:
        raise ConfigError(f"what is served to others guesses by itself: {config.proposer!r} does not")
    ahead = config.draft_ahead + 2 * config.draft_tokens
    return replace(config, cache=replace(config.cache, spare=max(config.cache.spare, ahead)))


def _desk(
    config: EngineConfig, proposers: Sequence[Proposer], vocab_size: int, digest: str, **more: Any
) -> Desk:
    ahead = config.draft_ahead + config.draft_tokens
    return Desk(proposers, config.capacity, ahead, vocab_size, digest, **more)

"""Settings as flags: one annotated field for each, inherited by every verb and benchmark that has them.

Flags, environment names, keys of a file, command lines of servers and the engine's own settings follow from
the fields. The settings check every value.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from kakeya.config import DEFAULT_MODEL, CacheConfig, Calling, EngineConfig
from kakeya.errors import ConfigError, InvalidArgument
from kakeya.types import BackendChoice, DType, KernelChoice, Numerics, SamplingParams, WeightFormat

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

SECRETS = frozenset({"api_key", "proposer_api_key"})
"""Settings whose values are never written anywhere, and stand on no command line of ours."""

# A flag in one panel of the help.
_model = partial(typer.Option, rich_help_panel="The model")
memory = partial(typer.Option, rich_help_panel="Memory and arithmetic")
_remote = partial(typer.Option, rich_help_panel="Remote proposers")
_answer = partial(typer.Option, rich_help_panel="The answer")

# Settings that some verbs have alone, or with another default.
Model = Annotated[
    str,
    _model(help="A catalogue name, a GGUF file, a directory with safetensors, or a hub id: org/name:Q4_K_M."),
]
NumericMode = Annotated[Numerics, memory(help="`exact`: bits never depend on other sessions.")]
Threads = Annotated[int | None, memory(help="CPU threads; all of them when left out.")]
Proposer = Annotated[
    str,
    memory(
        help="What guesses tokens ahead, for speed alone: `auto`, `none`, `ngram` (looks them up in the "
        "session), `drafter` or `drafter:PATH` (a small network trained for the model), `model:PATH` "
        "(a smaller model with the same tokenizer), `remote:HOST:PORT` (a `kakeya propose` elsewhere; more "
        "addresses with commas), or several joined by `+`."
    ),
]
MaxTokens = Annotated[int, _answer(help="The most tokens of one answer.")]
Temperature = Annotated[float, _answer(help="0 is greedy.")]
TopP = Annotated[float, _answer(help="Keep the likeliest tokens that reach this probability.")]
RepetitionPenalty = Annotated[float, _answer(help="Above 1: tokens of the history become less likely.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per answer, for scripts.")]


@dataclass(frozen=True)
class ComputeOptions:
    """The model, and fields of EngineConfig and CacheConfig under their own names."""

    model: Model = DEFAULT_MODEL
    backend: Annotated[
        BackendChoice, memory(help="What computes; `auto` is a CUDA device where torch sees one.")
    ] = EngineConfig.backend
    sink: Annotated[int, memory(help="First tokens kept for ever.")] = CacheConfig.sink
    window: Annotated[int, memory(help="Most recent tokens kept.")] = CacheConfig.window
    recall: Annotated[
        int | None,
        memory(
            help="How many tokens a turn may see again that have left the window; 0: none.",
            metavar="TOKENS",
        ),
    ] = CacheConfig.recall
    dtype: Annotated[DType, memory(help="Activations and cache.")] = EngineConfig.dtype
    weights: Annotated[WeightFormat, memory(help="How weights are held.")] = EngineConfig.weights
    numerics: NumericMode = EngineConfig.numerics
    kernels: Annotated[
        KernelChoice, memory(help="Which code computes: our own (C++, on CUDA Triton) or torch.")
    ] = EngineConfig.kernels
    threads: Threads = None
    proposer: Proposer = EngineConfig.proposer
    draft_tokens: Annotated[int, memory(help="The most tokens that a proposer guesses at once.")] = (
        EngineConfig.draft_tokens
    )
    draft_ahead: Annotated[
        int,
        memory(
            help="The most tokens that a remote proposer goes on guessing while its last ones are verified; "
            "0 asks for guesses only when they are needed."
        ),
    ] = EngineConfig.draft_ahead

    def engine_config(self, capacity: int | None = None) -> EngineConfig:
        """The engine's settings. Raises ConfigError naming the option that is wrong.

        A subclass may have more fields of EngineConfig. A `capacity` given here replaces its own.
        """
        asked = vars(self) if capacity is None else {**vars(self), "capacity": capacity}
        parts = {"cache": build(CacheConfig, asked), "calling": self._calling()}
        config = build(EngineConfig, {**asked, **parts})
        if config.backend in (BackendChoice.CUDA, BackendChoice.MLX):
            # Before any model is fetched. torch takes a second to import, but these need it anyway.
            from kakeya.engine.backends import chosen_backend

            chosen_backend(config)
        return config

    def _calling(self) -> Calling:
        return Calling()


@dataclass(frozen=True)
class EngineOptions(ComputeOptions):
    """The same, for verbs that can ask remote proposers."""

    proposer_api_key: Annotated[str | None, _remote(help="The key for remote proposers.")] = None
    proposer_tls_ca: Annotated[
        str | None,
        _remote(help="Call them over TLS: the authority of their certificates, PEM, or `system`."),
    ] = None
    proposer_tls_cert: Annotated[str | None, _remote(help="Our certificate for them, PEM.")] = None
    proposer_tls_key: Annotated[str | None, _remote(help="Its key, PEM.")] = None

    def _calling(self) -> Calling:
        return Calling(
            self.proposer_api_key, self.proposer_tls_ca, self.proposer_tls_cert, self.proposer_tls_key
        )


@dataclass(frozen=True)
class TalkOptions(EngineOptions):
    """The same where sessions are conversations of people: what left a window is looked up for them."""

    recall: Annotated[
        int | None,
        memory(
            help="How many tokens a turn may see again that have left the window; 0: none. "
            "When left out: a quarter of the window.",
            metavar="TOKENS",
        ),
    ] = None

    def engine_config(self, capacity: int | None = None) -> EngineConfig:
        """As above, with the recall that was left out."""
        config = super().engine_config(capacity)
        if self.recall is not None:
            return config
        return replace(config, cache=replace(config.cache, recall=self._usual_recall(config.cache.window)))

    def _usual_recall(self, window: int) -> int:
        from kakeya.recall.index import PAGE  # here because it imports numpy, and help should not wait

        return window // 4 // PAGE * PAGE


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen, greedily by default. Raises ConfigError for max_tokens below 1."""

    max_tokens: MaxTokens = 256
    temperature: Temperature = SamplingParams.temperature
    top_p: TopP = SamplingParams.top_p
    top_k: Annotated[int, _answer(help="Keep this many of the likeliest tokens; 0 keeps all.")] = (
        SamplingParams.top_k
    )
    min_p: Annotated[float, _answer(help="Drop tokens below this share of the likeliest.")] = (
        SamplingParams.min_p
    )
    repetition_penalty: RepetitionPenalty = SamplingParams.repetition_penalty
    seed: Annotated[int | None, _answer(help="Same seed, same answer; drawn when left out.")] = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max-tokens must be at least 1, got {self.max_tokens}")

    def sampling_params(self) -> SamplingParams:
        """The sampler's settings; a seed is drawn when none was given. Raises ConfigError for a bad value."""
        seed = secrets.randbits(32) if self.seed is None else self.seed
        try:
            return build(SamplingParams, {**vars(self), "seed": seed})
        except InvalidArgument as error:
            raise ConfigError(str(error)) from error


def build(settings: type[T], given: Mapping[str, Any]) -> T:
    """`settings` from the values given under the names of its fields. None leaves a field at its default."""
    return settings(**{f.name: given[f.name] for f in fields(settings) if given.get(f.name) is not None})


def flags(settings: Mapping[str, object]) -> list[str]:
    """Settings as they stand on a command line; one that is None is left out, and so is a secret."""
    return [
        part
        for name, value in settings.items()
        if value is not None and name not in SECRETS
        for part in (f"--{name.replace('_', '-')}", str(value))
    ]

"""The options verbs share, and the settings they become. The settings check every value."""

import secrets
from typing import Annotated

import typer

from kakeya.config import CacheConfig, EngineConfig
from kakeya.errors import ConfigError, InvalidArgument
from kakeya.types import BackendChoice, DType, KernelChoice, Numerics, SamplingParams, WeightFormat

_MODEL = "The model"
MEMORY = "Memory and arithmetic"
_ANSWER = "The answer"

Model = Annotated[
    str,
    typer.Option(
        help="A catalogue name, a GGUF file, a directory with safetensors, or a hub id: org/name:Q4_K_M.",
        rich_help_panel=_MODEL,
    ),
]
Backend = Annotated[
    BackendChoice,
    typer.Option(help="What computes; `auto` is a CUDA device where torch sees one.", rich_help_panel=MEMORY),
]
Sink = Annotated[int, typer.Option(help="First tokens kept for ever.", rich_help_panel=MEMORY)]
Window = Annotated[int, typer.Option(help="Most recent tokens kept.", rich_help_panel=MEMORY)]
Dtype = Annotated[DType, typer.Option(help="Activations and cache.", rich_help_panel=MEMORY)]
Weights = Annotated[WeightFormat, typer.Option(help="How weights are held.", rich_help_panel=MEMORY)]
NumericMode = Annotated[
    Numerics,
    typer.Option(help="`exact`: bits never depend on other sessions.", rich_help_panel=MEMORY),
]
Kernels = Annotated[
    KernelChoice,
    typer.Option(help="Which code computes: our own (C++, on CUDA Triton) or torch.", rich_help_panel=MEMORY),
]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads; all of them when left out.", rich_help_panel=MEMORY)
]

MaxTokens = Annotated[int, typer.Option(help="The most tokens of one answer.", rich_help_panel=_ANSWER)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=_ANSWER)]
TopP = Annotated[
    float, typer.Option(help="Keep the likeliest tokens of this total.", rich_help_panel=_ANSWER)
]
TopK = Annotated[int, typer.Option(help="Keep so many likeliest tokens; 0 is all.", rich_help_panel=_ANSWER)]
MinP = Annotated[
    float, typer.Option(help="Drop tokens below this share of the likeliest.", rich_help_panel=_ANSWER)
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Above 1: what was said becomes less likely.", rich_help_panel=_ANSWER)
]
Seed = Annotated[
    int | None, typer.Option(help="Same seed, same answer; drawn when left out.", rich_help_panel=_ANSWER)
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object per answer, for scripts.")]


def engine_config(
    *,
    sink: int,
    window: int,
    dtype: DType,
    weights: WeightFormat,
    numerics: Numerics,
    kernels: KernelChoice,
    threads: int | None,
    backend: BackendChoice = EngineConfig.backend,
    capacity: int = 1,
    max_batch_tokens: int | None = None,
) -> EngineConfig:
    """The engine's settings. Raises ConfigError naming the option that cannot be."""
    asked = {"threads": threads, "max_batch_tokens": max_batch_tokens}
    config = EngineConfig(
        backend=backend,
        cache=CacheConfig(sink=sink, window=window),
        capacity=capacity,
        dtype=dtype,
        weights=weights,
        numerics=numerics,
        kernels=kernels,
        **{name: value for name, value in asked.items() if value is not None},
    )
    if backend is BackendChoice.CUDA:
        # Before any model is fetched. torch takes a second to import, but who asks for CUDA needs it anyway.
        from kakeya.engine.opening import chosen_backend

        chosen_backend(config)
    return config


def sampling_params(
    *,
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    repetition_penalty: float,
    seed: int | None,
) -> SamplingParams:
    """The sampler's settings, with a seed drawn when none was given. Raises ConfigError for a bad value."""
    try:
        return SamplingParams(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=secrets.randbits(32) if seed is None else seed,
        )
    except InvalidArgument as error:
        raise ConfigError(str(error)) from error


def checked_max_tokens(max_tokens: int) -> int:
    """The number itself. Raises ConfigError unless at least one token may be answered."""
    if max_tokens < 1:
        raise ConfigError(f"max-tokens must be at least 1, got {max_tokens}")
    return max_tokens

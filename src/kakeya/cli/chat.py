"""`kakeya chat`: talk to a model in the terminal, or through a pipe."""

from typing import Annotated

import typer

from kakeya.cli import options
from kakeya.config import DEFAULT_MODEL, CacheConfig, EngineConfig


def register(app: typer.Typer) -> None:
    app.command("chat", help="Talk to a model. Piped, each line is one turn.")(chat)


def chat(
    model: options.Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="The system message; it is never forgotten.")] = None,
    backend: options.Backend = EngineConfig.backend,
    sink: options.Sink = CacheConfig.sink,
    window: options.Window = CacheConfig.window,
    dtype: options.Dtype = EngineConfig.dtype,
    weights: options.Weights = EngineConfig.weights,
    numerics: options.NumericMode = EngineConfig.numerics,
    kernels: options.Kernels = EngineConfig.kernels,
    threads: options.Threads = None,
    max_tokens: options.MaxTokens = 512,
    temperature: options.Temperature = 0.2,
    top_p: options.TopP = 0.9,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.1,
    seed: options.Seed = None,
    as_json: options.Json = False,
) -> None:
    """Check the settings, load the model, and talk until the input ends."""
    sampling = options.sampling_params(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    most = options.checked_max_tokens(max_tokens)
    # Later, for these know the tokenizer, and help should not wait for it.
    from kakeya.cli.chat_loop import ChatLoop
    from kakeya.cli.console import Screen
    from kakeya.cli.conversation import SESSIONS_NEEDED, Conversation
    from kakeya.cli.opening import open_runtime

    config = options.engine_config(
        backend=backend,
        sink=sink,
        window=window,
        dtype=dtype,
        weights=weights,
        numerics=numerics,
        kernels=kernels,
        threads=threads,
        capacity=SESSIONS_NEEDED,
    )
    screen = Screen()
    with open_runtime(screen, model, config) as runtime:
        conversation = Conversation(runtime, sampling, most, system)
        ChatLoop(screen, conversation, runtime.describe(), as_json=as_json).run(sampling.seed)

"""`kakeya generate`: one prompt, one answer."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya.cli import options
from kakeya.cli.console import Screen
from kakeya.config import DEFAULT_MODEL, CacheConfig, EngineConfig
from kakeya.errors import InvalidArgument
from kakeya.types import SamplingParams

if TYPE_CHECKING:
    from kakeya.cli.answer import AnswerReport
    from kakeya.runtime import Runtime


def register(app: typer.Typer) -> None:
    app.command("generate", help="Answer one prompt and exit.")(generate)


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, or - to read it from stdin.")],
    model: options.Model = DEFAULT_MODEL,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False,
    backend: options.Backend = EngineConfig.backend,
    sink: options.Sink = CacheConfig.sink,
    window: options.Window = CacheConfig.window,
    dtype: options.Dtype = EngineConfig.dtype,
    weights: options.Weights = EngineConfig.weights,
    numerics: options.NumericMode = EngineConfig.numerics,
    kernels: options.Kernels = EngineConfig.kernels,
    threads: options.Threads = None,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    seed: options.Seed = None,
    as_json: options.Json = False,
) -> None:
    """Check the settings, load the model, stream the answer to stdout."""
    sampling = options.sampling_params(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )
    most = options.checked_max_tokens(max_tokens)
    config = options.engine_config(
        backend=backend,
        sink=sink,
        window=window,
        dtype=dtype,
        weights=weights,
        numerics=numerics,
        kernels=kernels,
        threads=threads,
    )
    text = _prompt_text(prompt)
    from kakeya.cli.opening import open_runtime

    screen = Screen()
    with open_runtime(screen, model, config) as runtime:
        token_ids, end_token_ids = _tokens(runtime, text, system, raw)
        session_id = runtime.create_session(client_label="generate", eos_token_ids=end_token_ids)
        report = _stream(screen, runtime, session_id, token_ids, most, sampling, quietly=as_json)
        dropped = runtime.info(session_id).dropped_token_count
        screen.line(_as_json(report, sampling.seed, dropped) if as_json else "")


def _stream(
    screen: Screen,
    runtime: "Runtime",
    session_id: str,
    token_ids: Sequence[int],
    max_tokens: int,
    sampling: SamplingParams,
    *,
    quietly: bool,
) -> "AnswerReport":
    from kakeya.cli.answer import Answer

    answer = Answer(runtime, session_id, token_ids, max_tokens, sampling)
    for piece in answer:
        if not quietly:
            screen.answer(piece)
    assert answer.report is not None, "an answer that did not fail has a report"
    return answer.report


def _prompt_text(prompt: str) -> str:
    text = sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    if not text:
        raise InvalidArgument("the prompt is empty; give some text, or - with text on stdin")
    return text


def _tokens(runtime: "Runtime", text: str, system: str | None, raw: bool) -> tuple[list[int], list[int]]:
    """The prompt's ids, and the ids that end the answer."""
    from kakeya.text.transcript import Transcript

    tokenizer, eos = runtime.tokenizer, runtime.model_config.eos_token_ids
    if raw:
        return tokenizer.encode(text, bos=True), list(eos)
    if not tokenizer.has_chat_template:
        raise InvalidArgument("this model has no chat template; use --raw to continue plain text")
    transcript = Transcript(tokenizer, eos, system)
    return transcript.next_turn(text).token_ids, sorted(transcript.end_token_ids)


def _as_json(report: "AnswerReport", seed: int, dropped_tokens: int) -> str:
    return json.dumps(
        {
            **asdict(report),
            "tokens_per_second": report.tokens_per_second,
            "seed": seed,
            "dropped_tokens": dropped_tokens,
        }
    )

"""`kakeya generate`: one prompt, one answer."""

import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from kakeya import options
from kakeya.cli.command import command_of
from kakeya.cli.console import Screen
from kakeya.errors import InvalidArgument

if TYPE_CHECKING:
    from kakeya.cli.answer import AnswerReport
    from kakeya.runtime import Runtime


def register(app: typer.Typer) -> None:
    app.command("generate", help="Answer one prompt and exit.")(command_of(GenerateOptions, generate))


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(options.SamplingOptions, options.EngineOptions):
    """What `kakeya generate` was asked for: one field per flag."""

    prompt: Annotated[str, typer.Argument(help="The prompt, or - to read it from stdin.")]
    system: Annotated[str | None, typer.Option(help="The system message.")] = None
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text; no chat template.")] = False
    as_json: options.Json = False


def generate(context: typer.Context, asked: GenerateOptions) -> None:
    """Check the settings, load the model, stream the answer to stdout."""
    sampling, config = asked.sampling_params(), asked.engine_config()
    text = _prompt_text(asked.prompt)
    from kakeya.cli.answer import Answer
    from kakeya.cli.opening import open_runtime

    screen = Screen()
    with open_runtime(screen, asked.model, config) as runtime:
        token_ids, end_token_ids = _tokens(runtime, text, asked.system, asked.raw)
        session_id = runtime.create_session(client_label="generate", eos_token_ids=end_token_ids)
        answer = Answer(runtime, session_id, token_ids, asked.max_tokens, sampling)
        for piece in answer:
            if not asked.as_json:
                screen.answer(piece)
        assert answer.report is not None, "an answer that did not fail has a report"
        dropped = runtime.info(session_id).dropped_token_count
        screen.line(_as_json(answer.report, sampling.seed, dropped) if asked.as_json else "")


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

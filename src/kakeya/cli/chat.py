"""`kakeya chat`: talk to a model in the terminal, or through a pipe."""

from dataclasses import dataclass
from typing import Annotated

import typer

from kakeya import options
from kakeya.cli.command import command_of


def register(app: typer.Typer) -> None:
    app.command("chat", help="Talk to a model. Piped, each line is one turn.")(command_of(ChatOptions, chat))


@dataclass(frozen=True)
class ChatOptions(options.SamplingOptions, options.TalkOptions):
    """What `kakeya chat` was asked for: one field per flag."""

    system: Annotated[str | None, typer.Option(help="The system message; it is never forgotten.")] = None
    max_tokens: options.MaxTokens = 512
    temperature: options.Temperature = 0.2
    top_p: options.TopP = 0.9
    repetition_penalty: options.RepetitionPenalty = 1.1
    as_json: options.Json = False


def chat(context: typer.Context, asked: ChatOptions) -> None:
    """Check the settings, load the model, and talk until the input ends."""
    sampling = asked.sampling_params()
    # Imported here because they import the tokenizer, and help should not wait for that.
    from kakeya.cli.chat_loop import ChatLoop
    from kakeya.cli.console import Screen
    from kakeya.cli.conversation import SESSIONS_NEEDED, Conversation
    from kakeya.cli.opening import open_runtime

    config, screen = asked.engine_config(capacity=SESSIONS_NEEDED), Screen()
    with open_runtime(screen, asked.model, config) as runtime:
        conversation = Conversation.begin(runtime, sampling, asked.max_tokens, asked.system)
        ChatLoop(screen, conversation, runtime.describe(), as_json=asked.as_json).run(sampling.seed)

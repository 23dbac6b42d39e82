"""What clients send to completions. What is not supported is refused by name."""

from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from kakeya.http_server.checks import check_stream_options, invalid
from kakeya.http_server.schema import MOST_TOP_LOGPROBS, CommonFields, Refused

MOST_CHOICES = 128
# What the original has.
_DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]


def _read_prompts(value: object) -> object:
    """A list of prompts, whichever of the four ways they were given in."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(_is_token_id(each) for each in value):
            return [value]
        if all(isinstance(each, str) for each in value) or all(_is_token_list(each) for each in value):
            return value
    raise ValueError(
        "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
    )


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token_list(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_token_id(each) for each in value)


_TOKEN_LIST = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
Prompts = Annotated[
    list[Prompt],
    BeforeValidator(_read_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                _TOKEN_LIST,
                {"type": "array", "items": _TOKEN_LIST, "minItems": 1},
            ]
        }
    ),
]


class CompletionRequest(CommonFields):
    """The body of POST /v1/completions."""

    prompt: Prompts
    max_tokens: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=MOST_TOP_LOGPROBS)] = None
    best_of: Annotated[int | None, Field(ge=1, le=MOST_CHOICES)] = None
    suffix: Refused = None

    @property
    def most_tokens(self) -> int:
        return _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def scores_prompt(self) -> bool:
        return bool(self.echo) and self.logprobs is not None


def check_completion(request: CompletionRequest) -> None:
    """Raises ApiError, naming the field, where fields that are right by themselves contradict each other."""
    check_stream_options(request)
    if request.most_tokens == 0 and not request.echo:
        raise invalid("max_tokens", "max_tokens may be 0 only with echo: there would be nothing to say")
    if request.best_of is not None and request.best_of != request.choice_count:
        raise invalid("best_of", "best_of is not supported beyond n: every choice is returned")
    if len(request.prompt) * request.choice_count > MOST_CHOICES:
        raise invalid("prompt", f"at most {MOST_CHOICES} choices are generated for all prompts together")

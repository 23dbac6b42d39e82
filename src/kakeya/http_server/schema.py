"""What the bodies of the routes have in common: strict fields, sampling, tools, metadata, refusals."""

import json
import secrets
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    FiniteFloat,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)

from kakeya.http_server.errors import ApiError, invalid
from kakeya.text.chat_template import OWN_VARIABLES
from kakeya.text.prompting import Message
from kakeya.text.turns import End
from kakeya.types import SamplingParams

if TYPE_CHECKING:
    from kakeya.runtime import Runtime

MOST_STOPS = 4
MOST_STOP_TOKENS = 128
MOST_TOP_LOGPROBS = 20
MOST_TOOLS = 128
MOST_TOKENS = 2**31 - 1
_LONGEST_NAME, _LONGEST_VALUE, _MOST_PAIRS = 64, 512, 16
_SEEDS = 2**64
# Odd, so that the seeds of a request's choices are all different; the golden ratio, so that they are far
# from those of a request with the next seed.
_SEED_STEP = 0x9E3779B97F4A7C15

M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel, extra="forbid", strict=True):
    """Fields that are not known are refused, and nothing is converted silently."""


def _refused(value: object, info: ValidationInfo) -> None:
    if value is not None:
        raise ValueError(f"{info.field_name} is not supported by this server; leave it out")


def of_type(noun: str, *supported: str) -> Callable[[Any], Any]:
    """A check, made before all others, that an object is of a type that is supported."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") not in supported:
            known = ", ".join(map(repr, supported))
            raise ValueError(f"{noun} of type {value.get('type')!r} are not supported, only {known}")
        return value

    return check


def _read_stops(value: object) -> object:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError("stop must be a string or a list of strings, none of them empty")
    if len(stops) > MOST_STOPS:
        raise ValueError(f"at most {MOST_STOPS} stop strings are supported, got {len(stops)}")
    return stops


def _read_bias(value: object) -> object:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError("logit_bias must map token ids to numbers from -100 to 100")
    for key, bias in value.items():
        if not isinstance(key, str) or not key.isascii() or not key.isdigit() or len(key) > 10:
            raise ValueError(f"the keys of logit_bias must be token ids, got {str(key)[:40]!r}")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise ValueError(f"the bias of token {key} must be a number from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


def refuses(names: str) -> Callable[[type[M]], type[M]]:
    """Adds fields of the original API that this server refuses unless they are null: `names`, with blanks."""
    refused = Annotated[None, BeforeValidator(_refused)]
    fields: dict[str, Any] = dict.fromkeys(names.split(), (refused, None))

    def with_fields(model: type[M]) -> type[M]:
        return create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields
        )

    return with_fields


_Stop = Annotated[str, Field(min_length=1)]
_GivenStops = _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS)] | None
Stops = Annotated[list[str], BeforeValidator(_read_stops, json_schema_input_type=_GivenStops)]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_read_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                },
                {"type": "null"},
            ]
        }
    ),
]
MaxTokens = Annotated[int | None, Field(ge=1, le=MOST_TOKENS)]
_StopTokenIds = Annotated[
    list[Annotated[int, Field(ge=0, le=MOST_TOKENS)]], Field(max_length=MOST_STOP_TOKENS)
]


def _checked_metadata(pairs: dict[str, str] | None) -> dict[str, str]:
    pairs = pairs or {}
    if len(pairs) > _MOST_PAIRS:
        raise ValueError(f"metadata holds at most {_MOST_PAIRS} pairs, got {len(pairs)}")
    for name, value in pairs.items():
        if len(name) > _LONGEST_NAME or len(value) > _LONGEST_VALUE:
            raise ValueError(
                f"a name in metadata has at most {_LONGEST_NAME} characters and a value {_LONGEST_VALUE}; "
                f"{name[:_LONGEST_NAME]!r} has more"
            )
    return pairs


def _checked_arguments(arguments: str) -> str:
    try:
        is_object = isinstance(json.loads(arguments), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise ValueError("arguments must be a JSON object, written as a string")
    return arguments


Metadata = Annotated[dict[str, str] | None, AfterValidator(_checked_metadata)]
# What a function is called, and what it is called with.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
Arguments = Annotated[str, AfterValidator(_checked_arguments)]


class SamplingFields(Strict):
    """How tokens are chosen and what ends them: OpenAI's fields and their defaults, and those of servers for
    open models.

    Penalties look at all that the session remembers, the prompt included.
    """

    temperature: Annotated[FiniteFloat | None, Field(ge=0, le=2)] = None
    top_p: Annotated[FiniteFloat | None, Field(gt=0, le=1)] = None
    presence_penalty: Annotated[FiniteFloat | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[FiniteFloat | None, Field(ge=-2, le=2)] = None
    logit_bias: LogitBias = Field(default_factory=dict)
    seed: Annotated[int | None, Field(ge=-(2**63), lt=_SEEDS)] = None
    top_k: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    min_p: Annotated[FiniteFloat | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[FiniteFloat | None, Field(ge=0.01, le=100)] = None
    min_tokens: Annotated[int | None, Field(ge=0, le=MOST_TOKENS)] = None
    ignore_eos: bool | None = None
    stop_token_ids: _StopTokenIds | None = None

    @property
    @abstractmethod
    def wants_logprobs(self) -> bool:
        """Whether tokens are sent with their log-probabilities."""

    @property
    @abstractmethod
    def most_probable(self) -> int:
        """How many of the most probable tokens are sent in each token's place."""

    def samplings(self, count: int = 1) -> list[SamplingParams]:
        """How each of `count` choices is sampled. The first has the seed that was given."""
        fields = ((name, getattr(self, name)) for name in SamplingFields.model_fields)
        settings: dict[str, Any] = {name: value for name, value in fields if value is not None}
        settings |= {"logprobs": self.wants_logprobs, "top_logprobs": self.most_probable}
        settings.setdefault("temperature", 1.0)
        first = settings.pop("seed", secrets.randbits(63))
        seeds = ((first + choice * _SEED_STEP) % _SEEDS for choice in range(count))
        return [SamplingParams(**settings, seed=seed) for seed in seeds]


class StreamOptions(Strict):
    """Nothing is obfuscated here, so that can only be declined."""

    include_obfuscation: Literal[False] | None = None


class AnswerFields(SamplingFields):
    """What every request for an answer may have besides, whoever's API it is."""

    model: str | None = None
    stream: bool | None = None

    def check(self, runtime: "Runtime") -> None:
        """Raises ApiError, naming the field, for what contradicts the model or other fields."""
        if self.model is not None:
            check_model(self.model, runtime)
        last = runtime.model_config.vocab_size - 1
        named = {"logit_bias": self.logit_bias, "stop_token_ids": self.stop_token_ids or ()}
        for field, token_ids in named.items():
            for token_id in token_ids:
                if token_id > last:
                    raise invalid(field, f"{field}: {token_id} is not a token id; 0 to {last} are")


class RequestFields(AnswerFields):
    """What every request of OpenAI's APIs may have. Nothing depends on most of it.

    How long a prompt should stay cached is no promise that a bounded memory can make, and sessions are held
    anyway.
    """

    stream_options: StreamOptions | None = None
    user: str | None = None
    """Who is behind the request; nothing depends on it."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None

    def check(self, runtime: "Runtime") -> None:
        super().check(runtime)
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options needs stream to be true")


def check_model(model: str, runtime: "Runtime") -> None:
    """Raises ApiError for a model that this server does not serve."""
    served = runtime.describe().model
    if model != served:
        message = f"there is no model {model!r} here; this server serves {served!r}"
        raise ApiError(404, message, param="model", code="model_not_found")


class Function(Strict):
    """A function that the model may call. Its arguments always fit the schema, strict or not."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    """JSON that fits the schema, strict or not."""

    name: Name
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


# How long to think, and how much to say. Models are not told of either.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]


def checked_variables(variables: dict[str, Any] | None) -> dict[str, Any] | None:
    """What a chat template is told besides. Raises ValueError for a name that is not the caller's to set."""
    for name in variables or ():
        if name in OWN_VARIABLES:
            raise ValueError(f"{name!r} is not yours to set: the server gives it to the template")
    return variables


TemplateVariables = Annotated[dict[str, Any] | None, AfterValidator(checked_variables)]


def conversation_end(*, opens_answer: bool | None, continues_last: bool | None, last: Message) -> End:
    """Where a conversation ends. Raises ApiError, naming the field, where that cannot be."""
    if not continues_last:
        return End.MESSAGE if opens_answer is False else End.ANSWER
    field = "continue_final_message"
    if opens_answer:
        raise invalid(field, f"{field} and add_generation_prompt exclude each other")
    if last.role != "assistant" or last.tool_calls:
        raise invalid(field, f"{field} needs a last message that is the assistant's, without calls")
    return End.WITHIN

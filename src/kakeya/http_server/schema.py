"""What the bodies of the routes have in common: strict fields, sampling, tools, metadata, refusals."""

import json
import secrets
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)
from pydantic.functional_validators import AfterValidator

from kakeya.types import SamplingParams

MOST_STOPS = 4
MOST_TOP_LOGPROBS = 20
MOST_TOOLS = 128
_LONGEST_NAME, _LONGEST_VALUE, _MOST_PAIRS = 64, 512, 16
_MOST_TOKENS = 2**31 - 1
_SEEDS = 2**64
# Odd, so that the seeds of a request's choices are all different; the golden ratio, so that they are far
# from those of a request with the next seed.
_SEED_STEP = 0x9E3779B97F4A7C15


M = TypeVar("M", bound=BaseModel)


class Strict(BaseModel):
    """Fields that are not known are refused, and nothing is converted silently."""

    model_config = ConfigDict(extra="forbid", strict=True)


def _refused(value: object, info: ValidationInfo) -> None:
    if value is not None:
        raise ValueError(f"{info.field_name} is not supported by this server; leave it out")


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
    return {_token_id(key): _bias(key, bias) for key, bias in value.items()}


def _token_id(key: object) -> int:
    if not isinstance(key, str) or not key.isascii() or not key.isdigit() or len(key) > 10:
        raise ValueError(f"the keys of logit_bias must be token ids, got {str(key)[:40]!r}")
    return int(key)


def _bias(key: object, bias: object) -> float:
    if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
        raise ValueError(f"the bias of token {key} must be a number from -100 to 100")
    return float(bias)


_Refused = Annotated[None, BeforeValidator(_refused)]


def refuses(names: str) -> Callable[[type[M]], type[M]]:
    """Adds fields of the original API that this server does not have; null is as good as absent.

    The names stand in one string, with blanks between them.
    """
    fields: dict[str, Any] = dict.fromkeys(names.split(), (_Refused, None))

    def with_fields(model: type[M]) -> type[M]:
        return create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields
        )

    return with_fields


Stops = Annotated[
    list[str],
    BeforeValidator(_read_stops),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MOST_STOPS},
                {"type": "null"},
            ]
        }
    ),
]
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
MaxTokens = Annotated[int | None, Field(ge=1, le=_MOST_TOKENS)]


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
    """How tokens are chosen: OpenAI's fields and their defaults, and four of our own.

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

    def choices(self, count: int, *, logprobs: bool, top_logprobs: int) -> list[SamplingParams]:
        """How each of `count` choices is sampled. The first has the seed that was given."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        settings: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": self.top_k or 0,
            "min_p": self.min_p or 0.0,
            "repetition_penalty": self.repetition_penalty or 1.0,
            "presence_penalty": self.presence_penalty or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "logit_bias": self.logit_bias,
            "logprobs": logprobs,
            "top_logprobs": top_logprobs,
        }
        return [
            SamplingParams(seed=(seed + choice * _SEED_STEP) % _SEEDS, **settings) for choice in range(count)
        ]


class StreamOptions(Strict):
    """What a stream tells besides the answer. Nothing is obfuscated here, so that can only be declined."""

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class CompletionFields(SamplingFields):
    """What both kinds of completion share besides."""

    model: str
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    stop: Stops = Field(default_factory=list)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    """Who is behind the request; nothing depends on it."""

    @property
    def choice_count(self) -> int:
        return self.n or 1

    @property
    @abstractmethod
    def wants_logprobs(self) -> bool:
        """Whether tokens are told with their log-probabilities."""

    @property
    @abstractmethod
    def most_probable(self) -> int:
        """How many of the most probable tokens are told in each token's place."""

    def samplings(self) -> list[SamplingParams]:
        """How each choice for one prompt is sampled."""
        return self.choices(self.choice_count, logprobs=self.wants_logprobs, top_logprobs=self.most_probable)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

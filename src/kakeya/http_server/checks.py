"""Checks of a request that its fields alone cannot tell. Each names the field that is wrong."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kakeya.errors import InvalidArgument
from kakeya.http_server.errors import ApiError
from kakeya.http_server.schema import CompletionFields

if TYPE_CHECKING:
    from kakeya.runtime import Runtime


def invalid(param: str, message: str) -> ApiError:
    """The answer to a field with a wrong value."""
    return ApiError(400, message, param=param, code="invalid_value")


@contextmanager
def blames(param: str) -> Iterator[None]:
    """Whatever argument is found invalid inside, it is this field's fault."""
    try:
        yield
    except InvalidArgument as error:
        raise invalid(param, str(error)) from error


def check_stream_options(stream: bool | None, stream_options: object) -> None:
    if stream_options is not None and not stream:
        raise invalid("stream_options", "stream_options needs stream to be true")


def check_model(model: str, runtime: "Runtime") -> None:
    """Raises ApiError for a model that this server does not serve."""
    served = runtime.describe().model
    if model != served:
        raise ApiError(
            404,
            f"there is no model {model!r} here; this server serves {served!r}",
            param="model",
            code="model_not_found",
        )


def check_bias(logit_bias: Iterable[int], runtime: "Runtime") -> None:
    """Raises ApiError for a biased token that the model does not have."""
    vocabulary = runtime.model_config.vocab_size
    for token_id in logit_bias:
        if token_id >= vocabulary:
            raise invalid(
                "logit_bias", f"logit_bias: {token_id} is not a token id; 0 to {vocabulary - 1} are"
            )


def check_against_model(request: CompletionFields, runtime: "Runtime") -> None:
    """Raises ApiError for another model, a biased token it does not have, more choices than sessions."""
    check_model(request.model, runtime)
    check_bias(request.logit_bias, runtime)
    capacity = runtime.describe().capacity
    if request.choice_count > capacity:
        raise invalid(
            "n", f"n must be at most {capacity}, as many as this server has sessions, got {request.n}"
        )

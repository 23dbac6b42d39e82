"""Checks of a request that its fields alone cannot tell. Each names the field that is wrong."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kakeya.errors import InvalidArgument
from kakeya.http_server.errors import ApiError
from kakeya.http_server.schema import CommonFields

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


def check_stream_options(request: CommonFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options", "stream_options needs stream to be true")


def check_against_model(request: CommonFields, runtime: "Runtime") -> None:
    """Raises ApiError for another model, a biased token it does not have, more choices than sessions."""
    facts, vocabulary = runtime.describe(), runtime.model_config.vocab_size
    if request.model != facts.model:
        raise ApiError(
            404,
            f"there is no model {request.model!r} here; this server serves {facts.model!r}",
            param="model",
            code="model_not_found",
        )
    for token_id in request.logit_bias:
        if token_id >= vocabulary:
            raise invalid(
                "logit_bias", f"logit_bias: {token_id} is not a token id; 0 to {vocabulary - 1} are"
            )
    if request.choice_count > facts.capacity:
        raise invalid(
            "n", f"n must be at most {facts.capacity}, as many as this server has sessions, got {request.n}"
        )

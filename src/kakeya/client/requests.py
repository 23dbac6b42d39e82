"""Requests of the wire, from what a caller gives. A value that does not fit its field is refused by name."""

import secrets
from collections.abc import Mapping
from typing import Any, TypeVar

from google.protobuf.message import Message

from kakeya.errors import InvalidArgument
from kakeya.wire import runtime_pb2 as pb

M = TypeVar("M", bound=Message)


def new_request_id() -> str:
    return secrets.token_hex(16)


def made(kind: type[M], **fields: Any) -> M:
    """A message with these fields; None leaves one unset. Raises InvalidArgument naming the first bad one."""
    message = kind()
    for name, value in fields.items():
        if value is None:
            continue
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError, OverflowError) as error:
            raise InvalidArgument(f"{name} cannot be {repr(value)[:60]}: {error}") from None
    return message


def generate_request(
    max_tokens: int,
    *,
    seed: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    logprobs: int | None = None,
) -> pb.GenerateRequest:
    """A request with a new id, for no session yet."""
    return made(
        pb.GenerateRequest,
        max_tokens=max_tokens,
        seed=seed,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        logprobs=logprobs,
        request_id=new_request_id(),
        group_tokens=True,
    )

"""The sampler's rules computed by the native kernels: the same tokens, and errors, as `sampler.sample`."""

import math
from array import array
from collections.abc import Sequence

from torch import Tensor

from kakeya.engine.logits import NO_TOKEN_LEFT, check_vocabulary, not_a_token
from kakeya.engine.sampler import Sampler, SampleRequest, not_finite
from kakeya.errors import StepFailed
from kakeya.kernels import Kernels
from kakeya.kernels.choice import Choice, ChoiceRequest, ChoiceStatus
from kakeya.types import SamplingParams, TokenEvent, TokenLogprob


def native_sampler(kernels: Kernels) -> Sampler:
    """One token for each row of logits, chosen by the threads of the kernels."""

    def choose(logits: Tensor, requests: Sequence[SampleRequest]) -> list[TokenEvent]:
        vocab_size = logits.shape[1]
        choices = kernels.choose(logits, [_choice_request(kernels, each, vocab_size) for each in requests])
        if any(choice.status != ChoiceStatus.CHOSEN for choice in choices):
            _refuse(choices, vocab_size)
        return [_event(*each) for each in zip(requests, choices, strict=True)]

    return choose


def _choice_request(kernels: Kernels, request: SampleRequest, vocab_size: int) -> ChoiceRequest:
    params = request.params
    number = 0.0 if params.is_greedy else kernels.uniform(params.seed, request.position)
    if params.logit_bias:
        check_vocabulary(params, vocab_size)
    return ChoiceRequest(
        params.temperature,
        params.top_k,
        params.top_p,
        math.log(params.min_p) if params.min_p > 0.0 else -math.inf,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        number,
        _int32(request.recent) if params.has_penalties else None,
        array("q", params.logit_bias) if params.logit_bias else None,
        array("d", params.logit_bias.values()) if params.logit_bias else None,
        request.mask,
        params.top_logprobs if _wants_logprobs(params) else -1,
    )


def _int32(token_ids: Sequence[int]) -> "array[int]":
    return token_ids if isinstance(token_ids, array) else array("i", token_ids)


def _wants_logprobs(params: SamplingParams) -> bool:
    return params.logprobs or params.top_logprobs > 0


def _refuse(choices: Sequence[Choice], vocab_size: int) -> None:
    """Raise for a logit that is not finite first, whatever is wrong with other rows."""
    for row, choice in enumerate(choices):
        if choice.status == ChoiceStatus.NOT_FINITE:
            raise not_finite(choice.best, row)
    wrong = next(choice for choice in choices if choice.status != ChoiceStatus.CHOSEN)
    if wrong.status == ChoiceStatus.NO_TOKEN:
        raise StepFailed(NO_TOKEN_LEFT)
    raise not_a_token("recent tokens", wrong.token, vocab_size)


def _event(request: SampleRequest, choice: Choice) -> TokenEvent:
    if not _wants_logprobs(request.params):
        return TokenEvent(choice.token)
    return TokenEvent(choice.token, choice.logprob, tuple(TokenLogprob(*each) for each in choice.top))

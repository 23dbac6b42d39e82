"""How proposers that have logits of their own draw from them: with the verifier's own random numbers."""

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kakeya.engine.proposer import DraftRequest
from kakeya.engine.sampler import SampleRequest


def sample_request(
    request: DraftRequest, guessed: Sequence[int], reach: int, known: int | None = None
) -> SampleRequest:
    """What the verifier chooses the token behind `guessed` with. Penalties look back over `reach` tokens.

    Nothing is said of tokens from `known` on, which have no logits.
    """
    sampling, position = request.sampling, len(request.tokens) + len(guessed)
    if known is not None and sampling.logit_bias:
        bias = {token: value for token, value in sampling.logit_bias.items() if token < known}
        sampling = replace(sampling, logit_bias=bias)
    if not sampling.has_penalties:
        return SampleRequest(sampling, position)
    # In C throughout: there may be as many tokens as a session sees, for each guess.
    recent = array("i", request.tokens[-reach:])
    recent.extend(guessed)
    recent = recent[-reach:]
    if known is not None:
        ids = np.asarray(recent)
        recent = array("i", ids[ids < known].tobytes())
    return SampleRequest(sampling, position, recent)

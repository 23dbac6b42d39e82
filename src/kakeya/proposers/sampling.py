"""How proposers that have logits of their own draw from them: with the verifier's own random numbers."""

from collections.abc import Sequence

from kakeya.engine.proposer import DraftRequest
from kakeya.engine.sampler import SampleRequest


def sample_request(request: DraftRequest, guessed: Sequence[int], reach: int) -> SampleRequest:
    """What the verifier chooses the token behind `guessed` with. Penalties look back over `reach` tokens."""
    sampling, position = request.sampling, len(request.tokens) + len(guessed)
    if not sampling.has_penalties:
        return SampleRequest(sampling, position)
    return SampleRequest(sampling, position, [*request.tokens[-reach:], *guessed][-reach:])

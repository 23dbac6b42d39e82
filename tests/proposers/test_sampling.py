"""What a proposer draws with: the verifier's request, as far as the proposer's own vocabulary goes."""

from array import array
from collections.abc import Sequence

import pytest

from kakeya.engine.proposer import DraftRequest
from kakeya.proposers.sampling import sample_request
from kakeya.types import SamplingParams
from support.engines import NothingKept

PENALTY = SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2)


@pytest.mark.parametrize("tokens", [[1, 9, 3, 4, 5], array("i", [1, 9, 3, 4, 5])])
@pytest.mark.parametrize(
    ("guessed", "reach", "known", "seen"),
    [
        ((), 3, None, [3, 4, 5]),
        ((9, 2), 3, None, [5, 9, 2]),
        ((9, 2), 3, 5, [2]),
        ((9, 2), 3, 6, [5, 2]),
        ((9, 2), 3, 10, [5, 9, 2]),
        ((2,), 10, 4, [1, 3, 2]),
        ((9, 2), 3, 0, []),
    ],
)
def test_penalties_look_back_over_what_is_known(
    tokens: Sequence[int], guessed: Sequence[int], reach: int, known: int | None, seen: list[int]
) -> None:
    request = DraftRequest(NothingKept(), tokens, 4, PENALTY)
    drawn = sample_request(request, guessed, reach, known)
    assert list(drawn.recent) == seen
    assert (drawn.params, drawn.position) == (PENALTY, len(tokens) + len(guessed))


def test_without_penalties_nothing_is_looked_back_at() -> None:
    request = DraftRequest(
        NothingKept(), [1, 2, 3], 4, SamplingParams(temperature=1.0, logit_bias={1: 2.0, 7: 1.0})
    )
    drawn = sample_request(request, [4], 8, 5)
    assert not drawn.recent
    assert drawn.params.logit_bias == {1: 2.0}
    assert sample_request(request, [4], 8).params is request.sampling

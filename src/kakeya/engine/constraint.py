"""The constraint seam: anything that says which tokens may come next, such as a grammar or a least length.

A constraint belongs to one generate. It limits what the sampler may choose. Log-probabilities are still those
of the model's own distribution.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol


class Constraint(Protocol):
    """The state of one generate's constraint. Used on the engine thread only.

    What it raises fails its own request and nobody else's.
    """

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        """The tokens that may come in each logit row, of which there are `len(draft) + 1`.

        A mask has a bit for each token id, the lowest first, little-endian; ids beyond its end may not
        come. Row i is as if the first i tokens of the draft had been accepted; after one that may not
        come, or that ends the generate, any mask will do. Leaves the state as it was.
        """

    def advance(self, token_ids: Sequence[int]) -> None:
        """These were chosen, in this order."""

    @property
    def is_complete(self) -> bool:
        """Nothing may follow but the end."""


def allows(mask: bytes, token_id: int) -> bool:
    """Whether a mask has the bit of a token."""
    byte, bit = divmod(token_id, 8)
    return byte < len(mask) and bool(mask[byte] >> bit & 1)


def is_last(token_id: int, end_token_ids: Collection[int], constraint: Constraint | None) -> bool:
    """Whether a generate ends with this token. The constraint must have advanced over it.

    It ends with one of its end tokens, or when the constraint is complete and allows none of them.
    """
    if token_id in end_token_ids:
        return True
    if constraint is None or not constraint.is_complete:
        return False
    mask = constraint.masks(())[0]
    return not any(allows(mask, end) for end in end_token_ids)


class LeastLength:
    """A constraint: no end token may come before `count` tokens. What `inner` demands goes first: where it
    leaves nothing but an end, the end may come.

    Once the tokens have come it has nothing more to say, and `inner` can take its place.
    """

    def __init__(
        self, count: int, end_token_ids: Iterable[int], vocab_size: int, inner: Constraint | None
    ) -> None:
        self.inner = inner
        self._missing = count
        self._vocabulary = (1 << vocab_size) - 1
        self._length = (vocab_size + 7) // 8
        self._going_on = self._vocabulary & ~sum(1 << token_id for token_id in frozenset(end_token_ids))

    @property
    def is_over(self) -> bool:
        return self._missing <= 0

    @property
    def is_complete(self) -> bool:
        return self.inner is not None and self.inner.is_complete

    def masks(self, draft: Sequence[int]) -> list[bytes]:
        allowed = [self._vocabulary] * (len(draft) + 1)
        if self.inner is not None:
            allowed = [int.from_bytes(mask, "little") for mask in self.inner.masks(draft)]
        held = [mask & self._going_on if row < self._missing else mask for row, mask in enumerate(allowed)]
        kept = [some or mask for some, mask in zip(held, allowed, strict=True)]
        return [(mask & self._vocabulary).to_bytes(self._length, "little") for mask in kept]

    def advance(self, token_ids: Sequence[int]) -> None:
        self._missing -= len(token_ids)
        if self.inner is not None:
            self.inner.advance(token_ids)

"""The constraint seam: anything that says which tokens may come next, such as a grammar.

A constraint belongs to one generate. It limits what the sampler may choose. Log-probabilities are still those
of the model's own distribution.
"""

from collections.abc import Collection, Sequence
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


def is_last(token_id: int, eos_token_ids: Collection[int], constraint: Constraint | None) -> bool:
    """Whether a generate ends with this token. The constraint must have advanced over it.

    It ends with an EOS, or when the constraint is complete and allows no EOS.
    """
    if token_id in eos_token_ids:
        return True
    if constraint is None or not constraint.is_complete:
        return False
    mask = constraint.masks(())[0]
    return not any(allows(mask, eos) for eos in eos_token_ids)

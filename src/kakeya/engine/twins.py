"""Forks whose prompt is not computed yet: one of them computes it, the others wait and copy its slab.

Shared beginnings end where a history outgrows its slab. Forks have the same history at any length, so several
choices for one prompt cost one prompt.
"""

from kakeya.engine.sequence import TokenSequence


class Twins:
    """Sequences whose first `length` tokens are the same. Owned by the engine thread."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.members: set[TokenSequence] = set()

    def join(self, sequence: TokenSequence) -> None:
        """Become a member of this group and of no other."""
        if sequence.twins is not None:
            sequence.twins.leave(sequence)
        self.members.add(sequence)
        sequence.twins = self

    def leave(self, sequence: TokenSequence) -> None:
        """From here on it computes for itself."""
        self.members.discard(sequence)
        sequence.twins = None

    def leads(self, sequence: TokenSequence) -> bool:
        """Whether the others wait for this one: of those that wait for a first token it is the furthest, or
        the first that came."""
        racing = [each for each in self.members if each.request is not None and not each.request.is_decoding]
        return sequence is max(racing, key=_progress, default=sequence)

    def computed(self, leader: TokenSequence) -> None:
        """Rows of a prompt were computed. When it is whole, all others copy it and the group is over.

        The last token is left to each: its logits are what the first token is chosen from.
        """
        end = self.length - 1
        if leader.slab.committed < end:
            return
        # Rows behind the end have overwritten what the window of the end still needs, unless they are spare.
        # So has what the leader recalled since.
        slab = leader.slab
        is_intact = slab.written - self.length <= slab.geometry.cache.spare and slab.untouched == slab.sink
        for each in list(self.members):
            if is_intact and each is not leader and each.slab.written < end < len(each.tokens):
                each.copy_prompt(leader, end)
            self.leave(each)


def make_twins(original: TokenSequence, fork: TokenSequence) -> None:
    """Let the two share what neither has computed.

    Not where this prompt may recall: what a turn brings back lies in the slab, and each has a record of its
    own. A prompt that the slab holds recalls nothing.
    """
    length = len(original.tokens)
    may_recall = original.recall is not None and length > original.slab.geometry.cache.capacity
    if may_recall or original.slab.written >= length - 1:
        return
    if original.twins is None or original.twins.length != length:
        Twins(length).join(original)
    assert original.twins is not None
    original.twins.join(fork)


def _progress(sequence: TokenSequence) -> tuple[int, int]:
    assert sequence.request is not None
    return sequence.slab.written, -sequence.request.number

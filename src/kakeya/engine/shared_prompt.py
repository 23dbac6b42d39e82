"""Forks whose prompt is not computed yet: one of them computes it, the others wait and copy its slab.

Shared prefixes end where a history outgrows its slab. Forks have the same history at any length, so several
choices for one prompt cost one prompt. Where they may recall, they share it up to where the turn sees what it
recalls: that, and the prompt's last tokens, each computes by itself.
"""

from kakeya.engine.sequence import TokenSequence


class SharedPrompt:
    """Sequences that need the same first `end` tokens computed. Owned by the engine thread."""

    def __init__(self, end: int) -> None:
        self.end = end
        self.members: set[TokenSequence] = set()

    def join(self, sequence: TokenSequence) -> None:
        """Become a member of this group and of no other."""
        if sequence.shared_prompt is not None:
            sequence.shared_prompt.leave(sequence)
        self.members.add(sequence)
        sequence.shared_prompt = self

    def leave(self, sequence: TokenSequence) -> None:
        """From here on it computes for itself."""
        self.members.discard(sequence)
        sequence.shared_prompt = None

    def leads(self, sequence: TokenSequence) -> bool:
        """Whether the others wait for this one: of those that wait for a first token it is the furthest, or
        the first that came."""
        racing = [each for each in self.members if each.request is not None and not each.request.is_decoding]
        return sequence is max(racing, key=_progress, default=sequence)

    def computed(self, leader: TokenSequence) -> None:
        """Rows of a prompt were computed. When they are all, the others copy them and the group is over."""
        slab, end = leader.slab, self.end
        if slab.committed < end:
            return
        # Rows behind the end have overwritten what the window of the end still needs, unless they are spare.
        is_intact = slab.written - end - 1 <= slab.geometry.cache.spare
        for each in list(self.members):
            is_behind = each is not leader and each.slab.written < end < len(each.tokens)
            # Both have recalled the same: what the leader brought back since is its own.
            if is_intact and is_behind and each.slab.recalled == slab.recalled:
                each.copy_prompt(leader, end)
            self.leave(each)


def share_prompt(original: TokenSequence, fork: TokenSequence, recalls_at: int) -> None:
    """Let the two share what neither has computed. `recalls_at`: the first position of this prompt that would
    see what is recalled.

    The prompt's last token is left to each: its logits are what the first token is chosen from. A prompt that
    the slab holds recalls nothing.
    """
    length, slab = len(original.tokens), original.slab
    may_recall = original.recall is not None and length > slab.geometry.cache.capacity
    end = min(recalls_at, length - 1) if may_recall else length - 1
    if slab.written >= end:
        return
    if original.shared_prompt is None or original.shared_prompt.end != end:
        SharedPrompt(end).join(original)
    assert original.shared_prompt is not None
    original.shared_prompt.join(fork)


def _progress(sequence: TokenSequence) -> tuple[int, int]:
    assert sequence.request is not None
    return sequence.slab.written, -sequence.request.number

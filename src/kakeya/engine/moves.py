"""Sequences that leave their slabs and come back, beside the running engine.

Nobody may use a sequence between the two calls that make a move: who moves it sees to that.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from kakeya.engine.backend import Backend
from kakeya.engine.batch import score_segment
from kakeya.engine.beginnings import Beginnings
from kakeya.engine.device import DeviceEvent
from kakeya.engine.drafting import Drafter
from kakeya.engine.inbox import Inbox
from kakeya.engine.moving import HostBuffers, laid, lent_state, lifted, rebuild_start
from kakeya.engine.recall import Retriever, let_search
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.state import RecallState, SequenceState, restore_recall
from kakeya.errors import SessionBusy


class Open(Protocol):
    """Opens an empty sequence, on the engine thread."""

    def __call__(
        self,
        owner: str,
        eos_token_ids: Sequence[int],
        pinned: int | None,
        recall: int = 0,
        *,
        clean: bool = True,
    ) -> TokenSequence: ...


@dataclass(frozen=True)
class Prepared:
    """An empty sequence, and when the device has done what it still had to do to its slab."""

    sequence: TokenSequence
    ready: DeviceEvent


class Moves:
    """Call from any thread but the engine's, which does the bookkeeping. The callers copy the contents."""

    def __init__(
        self, backend: Backend, inbox: Inbox, beginnings: Beginnings, drafter: Drafter | None, open_: Open
    ) -> None:
        self._backend, self._inbox, self._beginnings = backend, inbox, beginnings
        self._drafter, self._open = drafter, open_
        self.buffers = HostBuffers(backend.pool.device)

    @property
    def is_full(self) -> bool:
        """Whether no slab is free, as far as one can see without asking the engine."""
        return self._backend.pool.free_count == 0

    def check_free(self) -> None:
        """Raises NoFreeSlab when no slab is free."""
        self._inbox.ask(self._backend.pool.check_free)

    # Away.

    def lend(self, sequence: TokenSequence) -> SequenceState:
        """A resting sequence's state in place. `leave` or `stay` must follow.

        Raises SessionBusy while it generates.
        """

        def lend() -> SequenceState:
            sequence.rest()
            self._beginnings.forget(sequence)
            sequence.leave_twins()
            return lent_state(sequence, self._backend.fingerprint)

        return self._inbox.ask(lend)

    def lift(self, state: SequenceState) -> SequenceState:
        """A copy on the host of a state in place."""
        pool = self._backend.pool
        return lifted(state, pool.geometry, pool.device, self.buffers)

    def leave(self, sequence: TokenSequence) -> None:
        """Free the slab of a lent or prepared sequence, for whoever asks the engine for one after this. Does
        not wait: each call that waits takes as long as a step."""

        def leave() -> None:
            sequence.replace_drafts(None)
            self._backend.pool.release(sequence.slab)

        self._inbox.post(leave)

    def stay(self, sequence: TokenSequence) -> None:
        """A lent sequence goes on as if nothing had been."""
        self._inbox.ask(lambda: self._beginnings.rests(sequence))

    def copy_state(self, sequence: TokenSequence) -> SequenceState:
        """A copy on the host of what is committed of a sequence, whether it generates or not.

        Raises SessionBusy for one with recall that generates.
        """

        def copy() -> SequenceState:
            sequence.settle()
            if sequence.request is not None and sequence.recall is not None:
                raise SessionBusy("what a turn recalls may be half written")
            if sequence.error is not None:
                raise sequence.error
            state = lent_state(sequence, self._backend.fingerprint)
            # At once, because the next step may write; where it lies, because the engine must not wait.
            return self.lift(state) if on_cpu else replace(state, storage=state.storage.clone())

        on_cpu = self._backend.pool.device.type == "cpu"
        state = self._inbox.ask(copy)
        return state if on_cpu else self.lift(state)

    # Back.

    def prepare(
        self,
        owner: str,
        eos_token_ids: Sequence[int],
        sink: int,
        recall: RecallState | None = None,
        retriever: Retriever | None = None,
        *,
        clean: bool = False,
    ) -> Prepared:
        """An empty sequence whose slab the caller fills. `enter`, `rebuild` or `leave` must follow.

        Raises NoFreeSlab when no slab is free.
        """
        slots = 0 if recall is None else recall.slots

        def prepare() -> Prepared:
            sequence = self._open(owner, eos_token_ids, sink - slots, slots, clean=clean)
            if recall is not None:
                restore_recall(sequence, recall)
                let_search(sequence, retriever)
            return Prepared(sequence, DeviceEvent(self._backend.pool.device).record())

        return self._inbox.ask(prepare)

    def enter(self, prepared: Prepared, state: SequenceState, tokens: "array[int]") -> TokenSequence:
        """Fill the prepared sequence with a state on the host and its history."""
        sequence = prepared.sequence
        ready = laid(sequence.slab, state, prepared.ready)

        def enter() -> TokenSequence:
            ready.block_stream()
            self._settle_in(sequence, state.committed, tokens)
            sequence.replace_drafts(self._drafter.restore(state.draft) if self._drafter else None)
            return sequence

        return self._inbox.ask(enter)

    def rebuild(self, prepared: Prepared, tokens: "array[int]", block: int) -> TokenSequence:
        """Give a clean prepared sequence this history. The sinks are computed now. Of the rest the next
        generate computes as much as its future depends on, in blocks of `block` tokens."""
        sequence, slab = prepared.sequence, prepared.sequence.slab
        start = rebuild_start(len(tokens), slab.sink, slab.geometry, block)
        while start and slab.written < slab.sink:
            self._inbox.ask(lambda: self._compute_sinks(sequence, tokens, block))

        def go_on() -> TokenSequence:
            self._settle_in(sequence, start, tokens)
            return sequence

        return self._inbox.ask(go_on)

    def _compute_sinks(self, sequence: TokenSequence, tokens: "array[int]", block: int) -> None:
        if not sequence.tokens:
            sequence.append(tokens[: sequence.slab.sink])
        segment = score_segment(sequence, block)
        sequence.slab.reserve(segment.rows)
        self._backend.score(segment, _nothing)
        sequence.commit()

    def _settle_in(self, sequence: TokenSequence, committed: int, tokens: "array[int]") -> None:
        sequence.slab.written = sequence.slab.committed = committed
        sequence.tokens = tokens
        sequence.restore(())
        self._beginnings.rests(sequence)


def _nothing(position: int, logits: Tensor) -> None:
    """Of the logits: the keys and values are wanted alone."""

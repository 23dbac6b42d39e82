"""Sequences that leave their slabs and come back, beside the running engine.

Nobody may use a sequence between the two calls that make a move: who moves it sees to that.
"""

import math
from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from kakeya.engine.backend import Backend
from kakeya.engine.batch import score_segment
from kakeya.engine.device import DeviceEvent, on_side_stream
from kakeya.engine.drafting import Drafter
from kakeya.engine.inbox import Inbox
from kakeya.engine.moving import (
    HostBuffers,
    clear,
    copy_shape,
    lay,
    lent_state,
    lifted,
    rebuild_start,
    used_slots,
)
from kakeya.engine.recall import Retriever, let_search, past_from
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.shared_prefixes import SharedPrefixes
from kakeya.engine.state import RecallState, SequenceState, restore_recall
from kakeya.errors import SessionBusy


class Open(Protocol):
    """Opens an empty sequence: on any thread, if it `is_new` for nobody."""

    def __call__(
        self,
        owner: str,
        eos_token_ids: Sequence[int],
        pinned: int | None,
        recall: int = 0,
        *,
        is_new: bool = True,
    ) -> TokenSequence: ...


class Moves:
    """Call from any thread but the engine's, which does the bookkeeping. The callers copy the contents."""

    def __init__(
        self, backend: Backend, inbox: Inbox, prefixes: SharedPrefixes, drafter: Drafter | None, open_: Open
    ) -> None:
        self._backend, self._inbox, self._prefixes = backend, inbox, prefixes
        self._drafter, self._open = drafter, open_
        self.buffers = HostBuffers(backend.pool.device)

    @property
    def capacity(self) -> int:
        return len(self._backend.pool.storage)

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
            self._prefixes.release(sequence)
            sequence.leave_shared_prompt()
            sequence.is_lent = True
            state = lent_state(sequence, self._backend.fingerprint)
            assert state.ready is not None
            sequence.slab.ready = state.ready
            return state

        return self._inbox.ask(lend)

    def lift(self, state: SequenceState) -> SequenceState:
        """A copy on the host of a state in place."""
        pool = self._backend.pool
        return lifted(state, pool.geometry, pool.device, self.buffers)

    def lifted_bytes(self, state: SequenceState) -> int:
        """What a copy of its keys and values will take."""
        geometry = self._backend.pool.geometry
        slots = used_slots(state.committed, state.sink, geometry)
        return self.buffers.taken_by(math.prod(copy_shape(slots, geometry)) * state.storage.itemsize)

    def leave(self, sequence: TokenSequence) -> None:
        """Free the slab of a lent or prepared sequence. Does not wait for the engine."""
        slab, device = sequence.slab, self._backend.pool.device
        try:
            # Whoever has the slab next asks for drafts after this.
            self._inbox.post(lambda: sequence.replace_drafts(None))
        finally:
            with on_side_stream(device):
                slab.ready.block_stream()
                self._backend.pool.release(slab, DeviceEvent(device).record())

    def stay(self, sequence: TokenSequence) -> None:
        """A lent sequence goes on as if nothing had been."""

        def stay() -> None:
            sequence.is_lent = False
            self._prefixes.rests(sequence)

        self._inbox.ask(stay)

    def copy_state(self, sequence: TokenSequence) -> SequenceState:
        """A copy on the host of what is committed of a sequence, whether it generates or not.

        Raises SessionBusy for one that generates and may still take back what it recalls, and for one that
        was lent: its slab may be another's by now.
        """

        def copy() -> SequenceState:
            if sequence.is_lent:
                raise SessionBusy("the session is on its way out of its slab")
            sequence.settle()
            recall = None if sequence.request is None else sequence.request.recall
            if recall is not None and not recall.is_settled:
                raise SessionBusy("what a turn recalls may be half written")
            if sequence.error is not None:
                raise sequence.error
            state = lent_state(sequence, self._backend.fingerprint)
            # At once, because the next step may write; where it lies, because the engine must not wait.
            return self.lift(state) if on_cpu else replace(state, storage=state.storage.clone())

        slab, on_cpu = sequence.slab, self._backend.pool.device.type == "cpu"
        used = used_slots(slab.committed, slab.sink, slab.geometry)  # as far as one can see from here
        self.buffers.provide(copy_shape(used, slab.geometry), slab.storage.dtype)
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
    ) -> TokenSequence:
        """An empty sequence whose slab has anything in it. `enter`, `rebuild` or `leave` must follow. Does
        not wait for the engine.

        Raises NoFreeSlab when no slab is free.
        """
        slots = 0 if recall is None else recall.slots
        sequence = self._open(owner, eos_token_ids, sink - slots, slots, is_new=False)
        if recall is not None:
            restore_recall(sequence, recall)
            let_search(sequence, retriever)
        return sequence

    def enter(self, sequence: TokenSequence, state: SequenceState, tokens: "array[int]") -> "Future[None]":
        """Fill a prepared sequence with a state on the host and its history. Does not wait for the engine,
        which has it before whatever is asked later.

        If that fails, the answer says why, the slab is free, and calls on the sequence raise the same.
        """
        lay(sequence.slab, state)
        _settle_in(sequence, state.committed, tokens)

        def enter() -> None:
            try:
                sequence.slab.ready.block_stream()
                sequence.replace_drafts(self._drafter.restore(state.draft) if self._drafter else None)
                self._prefixes.rests(sequence)
            except Exception as error:
                sequence.error = error
                sequence.replace_drafts(None)
                self._prefixes.forget(sequence)
                self._backend.pool.release(sequence.slab)
                raise

        return self._inbox.post(enter)

    def rebuild(self, sequence: TokenSequence, tokens: "array[int]", block: int) -> None:
        """Give a prepared sequence this history. The sinks are computed now. Of the rest the next generate
        computes as much as its future depends on, in blocks of `block` tokens, with what each turn of its
        past brought back."""
        slab = sequence.slab
        clear(slab)
        start = rebuild_start(len(tokens), slab.sink, slab.geometry, block)
        while start and slab.written < slab.sink:
            self._inbox.ask(lambda: self._compute_sinks(sequence, tokens, block))

        def go_on() -> None:
            slab.ready.block_stream()
            _settle_in(sequence, start, tokens)
            if sequence.recall is not None:
                sequence.recall.past = past_from(sequence.recall.past, start)
            sequence.replace_drafts(self._drafter.new_drafts() if self._drafter else None)
            self._prefixes.rests(sequence)

        self._inbox.ask(go_on)

    def _compute_sinks(self, sequence: TokenSequence, tokens: "array[int]", block: int) -> None:
        sequence.slab.ready.block_stream()
        if not sequence.tokens:
            sequence.append(tokens[: sequence.slab.sink])
        segment = score_segment(sequence, block)
        sequence.slab.reserve(segment.rows)
        self._backend.score(segment, _nothing)
        sequence.commit()


def _settle_in(sequence: TokenSequence, committed: int, tokens: "array[int]") -> None:
    sequence.slab.written = sequence.slab.committed = committed
    sequence.tokens = tokens
    sequence.restore(())


def _nothing(position: int, logits: Tensor) -> None:
    """Of the logits: the keys and values are wanted alone."""

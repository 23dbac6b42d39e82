"""What the engine reports of its work: one call per event, on the engine thread unless it says otherwise."""

from enum import StrEnum


class SearchResult(StrEnum):
    """What came of a search of a session's past. All but the first leave what was recalled before."""

    FOUND = "found"
    NOTHING = "nothing"
    FAILED = "failed"


class EngineObserver:
    """Is called for every event that a metric counts. The base class does nothing.

    An observer must return quickly and never raise.
    """

    def request_queued(self) -> None:
        """A generate was accepted; none of it has been computed."""

    def request_started(self, queue_seconds: float, cached_tokens: int) -> None:
        """Its first step was planned; `cached_tokens` of its history were computed before."""

    def prompt_computed(self, tokens: int) -> None:
        """A prompt block was computed."""

    def prefix_copied(self, tokens: int) -> None:
        """So many tokens of a prompt were copied from what another session had computed."""

    def prefix_cache(self, held_bytes: int, evicted: int) -> None:
        """What the prefix cache holds now, and how many of its granules gave way just now."""

    def first_token(self, seconds: float) -> None:
        """The first token of a request, this long after it was queued."""

    def next_token(self, seconds: float) -> None:
        """Each further token, this long after the one before it."""

    def drafts(self, proposer: str, proposed: int, accepted: int) -> None:
        """The verifier judged the guesses of a proposer for one session."""

    def recall_searched(self, seconds: float, result: SearchResult) -> None:
        """A session's past was searched for what its turn should see. On any thread."""

    def recalled(self, ranges: int, slots: int, seconds: float) -> None:
        """A session sees other pieces of its past: so many. So many slots were computed for them."""

    def tokens_evicted(self, tokens: int) -> None:
        """Committed tokens left a session's window."""

    def request_ended(self, seconds: float, *, started: bool) -> None:
        """A request is over, read to its end, cancelled or failed; `started` if a step ever carried it."""

    def invariant_violated(self, invariant: str) -> None:
        """A session's bookkeeping broke and the session was failed."""

    def session_woken(self, place: str, seconds: float) -> None:
        """A session that slept in `place` has a slab again."""

    def snapshot_damaged(self) -> None:
        """A stored snapshot was not what was stored; it is computed again."""

    def admission(self, result: str) -> None:
        """A generate was accepted or refused at the door. On any thread."""


UNOBSERVED = EngineObserver()

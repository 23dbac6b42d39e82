"""What each owner uses of its quotas."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from kakeya.config import Quotas
from kakeya.errors import ResourceExhausted
from kakeya.types import OwnerUsage

NOTHING = OwnerUsage()


@dataclass
class _Usage:
    """What one owner has open, and the tokens it may still spend, which grow back with time."""

    tokens_left: float
    refilled_at: float
    sessions: int = 0
    requests: int = 0
    spent: int = 0
    """Tokens, in all."""
    elsewhere: OwnerUsage = NOTHING


class Limits:
    """Counts sessions, generates in flight and tokens by owner. Safe from any thread.

    Tokens are a bucket that holds one minute's worth and fills continuously. An append needs all its tokens
    in the bucket. A generate, whose length is not known, needs one and is charged at its end. The debt that
    it may leave must be refilled before anything else is admitted. In a cluster, what an owner uses elsewhere
    counts as well, as far as it is known here.
    """

    def __init__(self, quotas: Quotas, clock: Callable[[], float] = time.monotonic) -> None:
        self._quotas = quotas
        self._clock = clock
        self._lock = threading.Lock()
        self._owners: dict[str, _Usage] = {}

    @contextmanager
    def new_session(self, owner: str) -> Iterator[None]:
        """Count a session while it is being opened; one that fails to open is not counted.

        Raises ResourceExhausted when the owner has `max_sessions` already.
        """
        with self._lock:
            usage, most = self._usage(owner), self._quotas.max_sessions
            if most is not None and usage.sessions + usage.elsewhere.sessions >= most:
                raise ResourceExhausted(f"the max_sessions quota of {most} is used up: close a session first")
            usage.sessions += 1
        try:
            yield
        except BaseException:
            self.session_closed(owner)
            raise

    def session_recovered(self, owner: str) -> None:
        """A session was there before the process. It counts, whatever the quota has become."""
        with self._lock:
            self._usage(owner).sessions += 1

    def session_closed(self, owner: str) -> None:
        with self._lock:
            self._usage(owner).sessions -= 1

    @contextmanager
    def appending(self, owner: str, tokens: int) -> Iterator[None]:
        """Charge for tokens while they are being appended; a refused append costs nothing.

        Raises ResourceExhausted when the owner's minute does not hold that many.
        """
        with self._lock:
            self._check_tokens(owner, tokens)
            self._spend(owner, tokens)
        try:
            yield
        except BaseException:
            with self._lock:
                self._spend(owner, -tokens)
            raise

    def start_request(self, owner: str) -> None:
        """Count a generate that is about to start; `end_request` must follow.

        Raises ResourceExhausted when the owner has too many in flight or no token left.
        """
        with self._lock:
            usage, most = self._usage(owner), self._quotas.max_concurrent_requests
            if most is not None and usage.requests + usage.elsewhere.requests >= most:
                raise ResourceExhausted(
                    f"the max_concurrent_requests quota of {most} is used up: wait for one to end"
                )
            self._check_tokens(owner, 1)
            usage.requests += 1

    def end_request(self, owner: str, generated: int) -> None:
        """The generate is over; charge for what it generated."""
        with self._lock:
            self._usage(owner).requests -= 1
            self._spend(owner, generated)

    def usage(self) -> dict[str, OwnerUsage]:
        """What each owner uses here. Tokens are all that it ever spent here."""
        with self._lock:
            each = self._owners.items()
            return {owner: OwnerUsage(used.sessions, used.requests, used.spent) for owner, used in each}

    def count_elsewhere(self, usage: Mapping[str, OwnerUsage]) -> None:
        """What owners use at other servers; tokens are those spent there since this was last called."""
        with self._lock:
            for owner in self._owners.keys() | usage.keys():
                mine = self._usage(owner)
                mine.elsewhere = usage.get(owner, NOTHING)
                mine.tokens_left -= mine.elsewhere.tokens

    def _spend(self, owner: str, tokens: int) -> None:
        usage = self._usage(owner)
        usage.tokens_left -= tokens
        usage.spent += tokens

    def _usage(self, owner: str) -> _Usage:
        """The owner's usage, its tokens grown back up to now."""
        per_minute, now = self._quotas.tokens_per_minute or 0, self._clock()
        usage = self._owners.setdefault(owner, _Usage(per_minute, now))
        grown = usage.tokens_left + (now - usage.refilled_at) * per_minute / 60
        usage.tokens_left, usage.refilled_at = min(per_minute, grown), now
        return usage

    def _check_tokens(self, owner: str, tokens: int) -> None:
        per_minute = self._quotas.tokens_per_minute
        if per_minute is None:
            return
        if tokens > per_minute:
            raise ResourceExhausted(
                f"{tokens} tokens at once are more than a tokens_per_minute quota of {per_minute} ever has"
            )
        missing = tokens - self._usage(owner).tokens_left
        if missing > 0:
            seconds = missing * 60 / per_minute
            raise ResourceExhausted(
                f"the tokens_per_minute quota of {per_minute} is used up: "
                f"{tokens} more can be had in {seconds:.1f} s",
                retry_after=seconds,
            )

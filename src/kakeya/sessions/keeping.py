"""What is kept of sessions beside the engine's memory. Without a state directory: nothing.

`Durable` keeps them in a state directory, and lets those without a slab sleep.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import TypeVar

from kakeya.engine.sequence import TokenSequence
from kakeya.engine.stream import EventStream
from kakeya.errors import ConfigError
from kakeya.sessions.answers import Answers, Call
from kakeya.sessions.recording import RecordedStream
from kakeya.sessions.session import Session
from kakeya.storage.handoffs import Leaving
from kakeya.storage.session_file import SessionFile
from kakeya.types import Document, TierFacts, TokenRange

T = TypeVar("T")


class Keeping:
    """Is told of each session before its client is. A session lives and ends with its slab."""

    def recovered(self) -> Iterable[Session]:
        """The sessions that were there before the process."""
        return ()

    @contextmanager
    def working(self, session: Session) -> Iterator[TokenSequence]:
        """Its sequence, to change its history; it keeps its slab meanwhile. Raises SessionNotFound."""
        assert session.sequence is not None, "nobody sleeps without a state directory"
        yield session.sequence

    def with_slab(self, take: Callable[[], T]) -> T:
        """What `take` returns, which takes a slab. Raises ResourceExhausted when none can be had."""
        return take()

    @property
    def could_leave(self) -> int:
        """How many sessions could make room for others."""
        return 0

    def created(self, session: Session, call: Call, tokens: Sequence[int] = ()) -> None:
        """A session is there, with these tokens. Raises StorageFailed, and then it must go."""

    def forked(self, session: Session, original: Session, call: Call) -> None:
        """A session is there with the original's history. Raises StorageFailed, and then it must go."""

    def appended(self, session: Session, length: int, tokens: Sequence[int], call: Call) -> None:
        """The history has grown to `length` by these tokens. Raises StorageFailed: take them back."""

    def stream(self, session: Session, call: Call, wake: Callable[[], None], limit: int) -> EventStream:
        """The stream of a generate. It records up to `limit` events if the call can be repeated."""
        return RecordedStream(wake, limit) if call.request_id else EventStream(wake)

    def rested(self, session: Session) -> None:
        """A generate is over. Called on the engine thread."""

    def tell_again(self, session: Session, first: object) -> EventStream | None:
        """The events of a generate that another process has answered; None for one of this process."""
        return None

    def recalled(self, session: Session, named: Sequence[TokenRange], call: Call) -> None:
        """A client has named what it shall see again, and is told so. Raises StorageFailed: take it back."""

    @contextmanager
    def closing(self, session: Session, *, expired: bool = False) -> Iterator[None]:
        """Nothing is left of it when the body runs. Raises StorageFailed, and then it stays.

        One that has only `expired` stays if it was used since that was seen: SessionBusy.
        """
        yield

    def sweep(self, idle_ttl: float | None) -> list[Session]:
        """Put idle sessions to sleep; those that have expired, to be closed."""
        return []

    # Sessions that move between servers. Without a state directory they raise ConfigError.

    @property
    def epoch(self) -> int:
        """How often the state directory was taken over."""
        return 0

    def check_home(self) -> None:
        """Raises Fenced when another process has taken the state directory over."""

    def handing_over(self, session: Session, peer: str) -> AbstractContextManager[list[bytes | memoryview]]:
        """All that is stored of it, as the parts of a file. When the body ends well it is gone from here.

        Nobody uses it meanwhile. Raises SessionBusy while it generates.
        """
        raise _no_directory()

    def left(self, session: Session) -> None:
        """It was taken elsewhere: forget it here."""
        raise _no_directory()

    def stay(self, session: Session) -> None:
        """It was taken nowhere, and is at home here again."""
        raise _no_directory()

    def leaving(self) -> list[Leaving]:
        """Sessions of which nobody knows whether they were taken."""
        return []

    def take_in(self, moved: SessionFile, answers: Answers) -> Session:
        """A session that comes from elsewhere, stored; the answers to its request ids are known again."""
        raise _no_directory()

    def was_taken(self, session_id: str, epoch: int) -> bool:
        """Whether it was taken in here under this epoch. If not, it never will be."""
        raise _no_directory()

    @property
    def has_documents(self) -> bool:
        """Whether documents are kept."""
        return False

    def documents(self, kind: str) -> list[Document]:
        """Those that are kept, least recently used first. Raises ConfigError."""
        raise _no_documents()

    def change_documents(
        self, put: Sequence[Document], delete: Sequence[tuple[str, str]] = ()
    ) -> "Future[None]":
        """Keep some and delete others; done when that is stored, or StorageFailed. Raises ConfigError."""
        raise _no_documents()

    def idle_since(self, used_at: float) -> float:
        """Seconds since that time of the system's clock, as far as clocks can be trusted."""
        return 0.0

    def tiers(self) -> TierFacts | None:
        """Where sessions sleep, in numbers; None where none does."""
        return None

    def close(self) -> None:
        """The engine ends after this."""

    def end(self) -> None:
        """The engine has ended."""


def _no_directory() -> ConfigError:
    return ConfigError("sessions move between servers that have a state directory, and this one has none")


def _no_documents() -> ConfigError:
    return ConfigError("documents are kept in a state directory, and there is none: set state_dir")

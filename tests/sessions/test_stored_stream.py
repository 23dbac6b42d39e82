"""A stream whose events are stored first: what is seen is stored, whatever the storage does."""

import sqlite3
from concurrent.futures import Future

from kakeya.errors import StorageFailed
from kakeya.sessions.stored_stream import StoredStream, Work
from kakeya.types import DoneEvent, Event, FailedEvent, StopReason, TokenEvent, TruncatedEvent


class ByHand:
    """A journal whose transactions end when a test says so."""

    def __init__(self) -> None:
        self.works: list[tuple[Work, Future[int]]] = []
        self.written: list[tuple[int, list[Event]]] = []
        self.is_closed = False

    def start(self) -> int:
        return 10

    def submit(self, work: Work) -> "Future[int]":
        if self.is_closed:
            raise StorageFailed("closed")
        self.works.append((work, Future()))
        return self.works[-1][1]

    def write(self, db: sqlite3.Connection, start: int, events: list[Event]) -> None:
        self.written.append((start, events))

    def stored(self, length: int) -> None:
        self.length = length

    def lost_end(self, length: int) -> None:
        self.lost = length

    def commit(self) -> None:
        work, reply = self.works.pop(0)
        reply.set_result(work(None))

    def fail(self) -> None:
        self.works.pop(0)[1].set_exception(StorageFailed("full"))


def opened() -> tuple[StoredStream, ByHand]:
    stream, journal = StoredStream(lambda: None), ByHand()
    stream.journal = journal
    return stream, journal


def done(taken: int) -> DoneEvent:
    return DoneEvent(StopReason.CANCELLED, taken, 0.0, 0.0, 0)


def test_events_are_seen_when_they_are_stored_together() -> None:
    stream, journal = opened()
    for event in (TruncatedEvent(3), TokenEvent(1), TokenEvent(2)):
        stream.put(event)
    assert stream.poll_all() == []
    assert stream.unread == 2
    stream.put(TokenEvent(3))
    journal.commit()
    assert journal.written == [(10, [TruncatedEvent(3), TokenEvent(1), TokenEvent(2), TokenEvent(3)])]
    assert len(stream.poll_all()) == 4
    assert journal.length == 13
    assert journal.works == []


def test_a_cut_takes_back_what_was_stored_and_not_taken() -> None:
    stream, journal = opened()
    for token in range(4):
        stream.put(TokenEvent(token))
    journal.commit()
    assert [stream.poll(), stream.poll()] == [TokenEvent(0), TokenEvent(1)]
    stream.put(TokenEvent(9))
    stream.cut(done)
    assert stream.poll() is None
    journal.commit()  # of what was cut in the meantime: the write takes what is held by then
    journal.commit()  # the cut's own
    assert journal.written[-1] == (12, [done(2)])
    assert stream.poll_all() == [done(2)]


def test_a_commit_that_a_cut_has_passed_releases_nothing() -> None:
    stream, journal = opened()
    stream.put(TokenEvent(1))
    work, reply = journal.works.pop(0)
    result = work(None)
    stream.cut(done)
    reply.set_result(result)
    assert stream.poll() is None
    journal.commit()
    assert stream.poll_all() == [done(0)]
    assert journal.written[-1] == (10, [done(0)])


def test_what_is_appended_behind_a_cut_is_stored_behind_it() -> None:
    """The cut takes its place at once, though tokens are being stored, and nothing is written after it."""
    stream, journal = opened()
    stream.put(TokenEvent(1))
    work, reply = journal.works.pop(0)
    result = work(None)
    stream.cut(done)
    assert len(journal.works) == 1, "what is appended now is submitted next"
    reply.set_result(result)
    journal.commit()
    assert journal.written == [(10, [TokenEvent(1)]), (10, [done(0)])]
    assert stream.poll_all() == [done(0)]
    assert journal.works == []


def test_writes_of_one_transaction_that_begin_after_the_cut_tell_of_it_once() -> None:
    stream, journal = opened()
    stream.put(TokenEvent(1))
    stream.cut(done)
    before, own = [(work(None), reply) for work, reply in journal.works]
    for result, reply in (before, own):
        reply.set_result(result)
    assert {start for start, _ in journal.written} == {10}
    assert stream.poll_all() == [done(0)]
    assert len(journal.works) == 2, "nothing more is written: by then more may have been appended"


def test_of_a_write_that_a_cut_has_passed_no_failure_counts() -> None:
    stream, journal = opened()
    stream.put(TokenEvent(1))
    _, reply = journal.works.pop(0)
    stream.cut(done)
    reply.set_exception(StorageFailed("full"))
    assert stream.poll_all() == []
    journal.commit()
    assert stream.poll_all() == [done(0)]


def test_what_cannot_be_stored_is_not_seen() -> None:
    stream, journal = opened()
    stream.put(TokenEvent(1))
    journal.fail()
    assert stream.cancel_requested
    stream.cut(done)
    journal.fail()
    (last,) = stream.poll_all()
    assert isinstance(last, FailedEvent)
    assert isinstance(last.error, StorageFailed)
    assert journal.lost == 10


def test_an_end_that_cannot_be_stored_is_told_to_who_has_all_before_it() -> None:
    """The engine is done with such a generate, and cuts it no more."""
    stream, journal = opened()
    stream.put(TokenEvent(1))
    journal.commit()
    assert stream.poll() == TokenEvent(1)
    stream.put(done(1))
    journal.fail()
    (last,) = stream.poll_all()
    assert isinstance(last, FailedEvent)
    assert journal.lost == 11


def test_a_closed_storage_ends_the_generate() -> None:
    stream, journal = opened()
    journal.is_closed = True
    stream.put(TokenEvent(1))
    assert stream.cancel_requested
    stream.cut(done)
    (last,) = stream.poll_all()
    assert isinstance(last, FailedEvent)
    stream.cut(done)  # the reader has seen the end
    assert stream.poll_all() == []

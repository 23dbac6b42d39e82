"""The memory behind request ids: a repeated call gets the first answer and does nothing twice."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar

from kakeya.errors import InvalidArgument
from kakeya.sessions.recording import RecordedStream
from kakeya.storage.records import StoredAnswer

MAX_REQUEST_ID = 128
T = TypeVar("T")


class Call(NamedTuple):
    """What a request id stands for: the same id on another call or session is another request."""

    name: str
    session_id: str
    request_id: str

    def answered(self, owner: str, answer: Any) -> StoredAnswer | None:
        """The answer as it is stored; None where nobody can ask for it again."""
        if not self.request_id:
            return None
        return StoredAnswer(owner, self.name, self.session_id, self.request_id, answer)


class Answers:
    """The most recent answers of each owner, by call. Safe from any thread.

    Keeps `max_answers` for each owner, the generates among them with `max_events` events in all;
    what is still being answered is never forgotten.
    """

    def __init__(self, max_answers: int, max_events: int) -> None:
        self._max_answers = max_answers
        self._max_events = max_events
        self._lock = threading.Lock()
        self._owners: dict[str, dict[Call, Future[Any]]] = {}

    def once(
        self, owner: str, call: Call, answer: Callable[[], T], again: Callable[[T], T] | None = None
    ) -> T:
        """The answer to `call`, from `answer()` the first time.

        A repeat waits for the first call if need be and gets its answer, through `again` where given. If the
        first call raises, the repeats that wait for it raise the same. Later ones try again, because a
        refused call has changed nothing.
        """
        if not call.request_id:
            return answer()
        if len(call.request_id) > MAX_REQUEST_ID:
            raise InvalidArgument(
                f"request_id must have at most {MAX_REQUEST_ID} characters, got {len(call.request_id)}"
            )
        first, is_mine = self._claim(owner, call)
        if not is_mine:
            return first.result() if again is None else again(first.result())
        try:
            result = answer()
        except BaseException as error:
            with self._lock:
                del self._owners[owner][call]
            first.set_exception(error)
            raise
        first.set_result(result)
        return result

    def remember(self, owner: str, call: Call, answer: object) -> None:
        """Add an answer that was given before this process was there."""
        first: Future[Any] = Future()
        first.set_result(answer)
        with self._lock:
            self._owners.setdefault(owner, {})[call] = first

    def _claim(self, owner: str, call: Call) -> "tuple[Future[Any], bool]":
        """The future of the call's answer, and whether the caller is the one to set it."""
        with self._lock:
            answers = self._owners.setdefault(owner, {})
            if call in answers:
                return answers[call], False
            self._make_room(answers)
            answers[call] = Future()
            return answers[call], True

    def _make_room(self, answers: "dict[Call, Future[Any]]") -> None:
        """Forget the oldest final answers, until one more fits."""
        events = sum(_events(answer) for answer in answers.values())
        for call, answer in list(answers.items()):
            if len(answers) < self._max_answers and events <= self._max_events:
                return
            if _is_final(answer):
                events -= _events(answer)
                del answers[call]


def _is_final(answer: "Future[Any]") -> bool:
    if not answer.done():
        return False
    stream = _stream(answer)
    return stream is None or stream.is_settled


def _events(answer: "Future[Any]") -> int:
    stream = _stream(answer)
    return 0 if stream is None else stream.size


def _stream(answer: "Future[Any]") -> RecordedStream | None:
    """The generate behind an answer; None for a failed one, which is about to be removed."""
    result = answer.result() if answer.done() and answer.exception() is None else None
    return result if isinstance(result, RecordedStream) else None

"""The desk every call on a session passes: request ids, quotas, the store, then the engine."""

import logging
from collections.abc import Sequence as Tokens

from kakeya.config import RuntimeConfig
from kakeya.engine.constraint import Constraint
from kakeya.engine.engine import Engine
from kakeya.engine.observer import EngineObserver
from kakeya.engine.sequence import Sequence
from kakeya.engine.state import SequenceState
from kakeya.engine.stream import EventStream
from kakeya.errors import SessionNotFound
from kakeya.sessions.answers import Answers, Call
from kakeya.sessions.generating import Generating, admission_result
from kakeya.sessions.limits import Limits
from kakeya.sessions.paging import check_page_size, last_number, page_token
from kakeya.sessions.recording import RecordedStream
from kakeya.sessions.session import Session, check_label
from kakeya.sessions.store import SessionStore
from kakeya.tracing import Tracing
from kakeya.types import SamplingParams, SessionInfo

log = logging.getLogger(__name__)


class SessionDesk:
    """Sessions over one engine. Methods may be called from any thread.

    A refused call leaves everything as it was. Calls that take a `request_id` answer a repeated one
    with the first answer, even while the first is still on its way.
    """

    def __init__(
        self,
        engine: Engine,
        config: RuntimeConfig,
        observer: EngineObserver,
        tracing: Tracing | None = None,
    ) -> None:
        self._engine = engine
        self._config = config
        self._observer = observer
        self._tracing = tracing
        self._store = SessionStore()
        self._limits = Limits(config.quotas)
        self._answers = Answers(config.remembered_requests, config.remembered_events)

    def create(
        self,
        owner: str,
        client_label: str,
        eos_token_ids: Tokens[int],
        pinned_prefix_tokens: int | None,
        request_id: str,
    ) -> str:
        """A new empty session; its id."""
        check_label(client_label)

        def create() -> str:
            with self._limits.new_session(owner):
                sequence = self._engine.open(owner, eos_token_ids, pinned_prefix_tokens)
            return self._keep(sequence, client_label, "session created", request_id)

        return self._answers.once(owner, Call("create", "", request_id), create)

    def append(
        self,
        session_id: str,
        token_ids: Tokens[int],
        expected_history_length: int | None,
        owner: str,
        request_id: str,
    ) -> int:
        """Add tokens to the history; returns its length."""

        def append() -> int:
            session = self.used(session_id, owner)
            with self._limits.appending(owner, len(token_ids)):
                return self._engine.append(session.sequence, token_ids, expected_history_length)

        return self._answers.once(owner, Call("append", session_id, request_id), append)

    def generate(
        self,
        session_id: str,
        max_tokens: int,
        sampling: SamplingParams,
        owner: str,
        request_id: str,
        constraint: Constraint | None = None,
    ) -> EventStream:
        """Start a generate, or tell again what the first one with this request id gave."""

        def start() -> EventStream:
            try:
                session = self.used(session_id, owner)
                stream = self._start(session, max_tokens, sampling, request_id, constraint)
            except BaseException as error:
                self._observer.admission(admission_result(error))
                raise
            self._observer.admission("accepted")
            return stream

        def tell_again(first: EventStream) -> EventStream:
            assert isinstance(first, RecordedStream), "a call with a request id is recorded"
            if first.cancel_requested and not first.is_settled:
                self._engine.rest(self._store.get(session_id, owner).sequence)
            return first.replay()

        return self._answers.once(owner, Call("generate", session_id, request_id), start, tell_again)

    def fork(self, session_id: str, owner: str, request_id: str) -> str:
        """A copy of a resting session, independent from here on; its id."""

        def fork() -> str:
            session = self.used(session_id, owner)
            with self._limits.new_session(owner):
                copy = self._engine.fork(session.sequence)
            return self._keep(copy, session.client_label, "session forked", request_id, session)

        return self._answers.once(owner, Call("fork", session_id, request_id), fork)

    def adopt(self, state: SequenceState, owner: str, client_label: str) -> str:
        """A new session that continues an exported one; its id."""
        check_label(client_label)
        with self._limits.new_session(owner):
            sequence = self._engine.import_state(state, owner)
        return self._keep(sequence, client_label, "session imported", "")

    def used(self, session_id: str, owner: str) -> Session:
        """The owner's session, its idle clock refreshed."""
        session = self._store.get(session_id, owner)
        session.touch()
        return session

    def info(self, session_id: str, owner: str) -> SessionInfo:
        """What a session holds. Asking does not refresh the idle clock."""
        session = self._store.get(session_id, owner)
        return self._engine.read(session.sequence, session.describe)

    def page(self, owner: str, size: int, token: str) -> tuple[list[SessionInfo], str]:
        """The owner's sessions, oldest first, and the token of the next page ("" on the last).

        Whatever comes and goes between pages, a session that stays is listed exactly once.
        """
        check_page_size(size)
        after = last_number(token)
        rest = [session for session in self._store.owned_by(owner) if session.number > after]
        shown = rest[:size]
        return self._described(shown), page_token(shown[-1].number) if len(rest) > size else ""

    def close(self, session_id: str, owner: str) -> int:
        """Free a session; returns its final history length."""
        session = self._store.get(session_id, owner)
        if not self._forget(session):
            raise SessionNotFound(f"no session {session_id!r}")
        length = self._engine.close(session.sequence)
        log.info("session closed", extra={"session_id": session_id, "history_length": length})
        return length

    def sweep(self) -> int:
        """Close the sessions that nobody has used for the configured time; how many they were."""
        ttl = self._config.session_idle_ttl_s
        if ttl is None:
            return 0
        closed = 0
        for session in self._store.all():
            if session.idle_seconds >= ttl and self._expire(session, ttl):
                closed += 1
        return closed

    def count(self, state: str) -> int:
        """How many sessions are in a state."""
        return sum(session.state == state for session in self._store.all())

    def live_bytes(self) -> int:
        """Bytes of keys and values in all slabs that a next token could attend to."""
        return sum(session.live_bytes for session in self._store.all())

    def _keep(
        self, sequence: Sequence, label: str, message: str, request_id: str, original: Session | None = None
    ) -> str:
        session = self._store.add(sequence, label)
        if original is not None:
            session.share_past(original)
        ids = {"session_id": session.session_id, "request_id": request_id}
        log.info(message, extra=ids | {"client_label": label})
        return session.session_id

    def _start(
        self,
        session: Session,
        max_tokens: int,
        sampling: SamplingParams,
        request_id: str,
        constraint: Constraint | None,
    ) -> EventStream:
        self._limits.start_request(session.owner)
        generating = Generating(session, request_id, self._limits, self._config.remembered_events)
        try:
            if self._tracing is not None:
                generating.span = self._tracing.generate(session.session_id, request_id, max_tokens, sampling)
            return self._engine.generate(session.sequence, max_tokens, sampling, generating, constraint)
        except BaseException as error:
            generating.refused(error)
            raise

    def _described(self, sessions: Tokens[Session]) -> list[SessionInfo]:
        """What sessions hold, at one moment; those closed meanwhile are left out."""
        if not sessions:
            return []
        by_sequence = {id(session.sequence): session for session in sessions}

        def look(sequence: Sequence) -> SessionInfo | None:
            session = by_sequence[id(sequence)]
            return None if session.is_closed else session.describe(sequence)

        infos = self._engine.read_all([session.sequence for session in sessions], look)
        return [info for info in infos if info is not None]

    def _expire(self, session: Session, ttl: float) -> bool:
        if not self._engine.close_if(session.sequence, lambda _: session.has_expired(ttl)):
            return False
        log.info("idle session closed", extra={"session_id": session.session_id, "idle_ttl_s": ttl})
        return self._forget(session)

    def _forget(self, session: Session) -> bool:
        """Out of the store and off its owner's count; False when somebody else just did it."""
        if not self._store.remove(session):
            return False
        self._limits.session_closed(session.owner)
        return True

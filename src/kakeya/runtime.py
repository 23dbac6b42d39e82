"""The door: the calls that servers, the command line and users make on sessions over one loaded model."""

import logging
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torch import Tensor

from kakeya.config import DEFAULT_MODEL, EngineConfig, RuntimeConfig
from kakeya.engine.constraint import Constraint
from kakeya.engine.draft_length import DraftLength
from kakeya.engine.engine import Engine
from kakeya.engine.proposer import Proposer
from kakeya.engine.scoring import score_blocks, score_tokens
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.state import on_device, on_host, read_state, write_state
from kakeya.engine.stream import EventStream
from kakeya.errors import ConfigError, SessionNotFound, Unavailable
from kakeya.loading import LoadedModel, load_model
from kakeya.models.checkpoint import Checkpoint
from kakeya.observer import UNOBSERVED, EngineObserver
from kakeya.proposers.opening import open_proposers
from kakeya.sessions.answers import Answers, Call
from kakeya.sessions.generating import GenerateListener, admission_result
from kakeya.sessions.limits import Limits
from kakeya.sessions.recording import RecordedStream
from kakeya.sessions.session import Session, check_label
from kakeya.sessions.store import SessionStore
from kakeya.sessions.sweep import Sweeper
from kakeya.text import Tokenizer
from kakeya.tracing import Tracing
from kakeya.types import RuntimeFacts, SamplingParams, SessionInfo, ShareBeginnings, TokenEvent

if TYPE_CHECKING:
    from kakeya.metrics import Metrics  # a front end's, which brings it

log = logging.getLogger(__name__)

LOCAL_OWNER = "local"
# A program that embeds a runtime closes its sessions itself.
_LOCAL = RuntimeConfig(session_idle_ttl_s=None)


class Runtime:
    """Sessions over one loaded model. `Runtime.open` loads one and starts its engine.

    Methods may be called from any thread; each waits for the engine, at most one step. A refused call changes
    nothing. Only its owner can use a session: others get SessionNotFound. A call beyond an owner's quotas
    raises ResourceExhausted. A call that repeats a `request_id` gets the answer of the first, waits for it if
    need be, and does nothing twice. Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        model: LoadedModel,
        settings: RuntimeConfig = _LOCAL,
        metrics: "Metrics | None" = None,
        tracing: Tracing | None = None,
        proposers: Sequence[Proposer] = (),
        draft_length: DraftLength | None = None,
    ) -> None:
        self.config = model.config
        self.settings = settings
        self.tokenizer = model.tokenizer
        self.model_config = model.model_config
        self.fingerprint = model.backend.fingerprint
        self._facts = model.facts
        self.backend = model.backend  # to measure it by itself, while no session generates
        self._pool = model.backend.pool
        self._metrics = metrics
        self._tracing = tracing
        self._observer: EngineObserver = metrics or UNOBSERVED
        self._engine = Engine(model.backend, model.config, proposers, self._observer, draft_length)
        self._store = SessionStore()
        self._limits = Limits(settings.quotas)
        self._answers = Answers(settings.remembered_requests, settings.remembered_events)
        self._sweeper: Sweeper | None = None

    @classmethod
    def open(
        cls,
        model: str | Checkpoint = DEFAULT_MODEL,
        config: EngineConfig | None = None,
        settings: RuntimeConfig = _LOCAL,
        metrics: "Metrics | None" = None,
        tracing: Tracing | None = None,
        *,
        name: str = "",
        tokenizer: Tokenizer | None = None,
        proposers: Sequence[Proposer] | None = None,
    ) -> Self:
        """Load a model as `load_model` does, and the proposers that `config` names, and start the engine.

        Of guesses by `proposers` that are given instead, all are drafted.
        Without `settings` there are no quotas, and idle sessions are kept.
        Raises ModelError, and ConfigError for a model that does not fit in memory.
        """
        observed = {layer for proposer in proposers or () for layer in proposer.hidden_layers}
        loaded = load_model(model, config or EngineConfig(), name, tokenizer, len(observed))
        if proposers is not None:
            return cls(loaded, settings, metrics, tracing, proposers).start()
        loaded, proposers = open_proposers(loaded)
        return cls(loaded, settings, metrics, tracing, proposers, DraftLength()).start()

    def start(self) -> Self:
        """Start the engine, and what closes idle sessions. Call it once."""
        self._engine.start()
        if self._metrics is not None:
            self._metrics.watch_sessions(self._store.count, self._store.live_bytes, self._facts.pool_bytes)
        if self.settings.session_idle_ttl_s is not None:
            self._sweeper = Sweeper(self.sweep, self.settings.session_idle_ttl_s)
            self._sweeper.start()
        return self

    def describe(self) -> RuntimeFacts:
        """What was loaded and how it runs."""
        return self._facts

    @property
    def ended(self) -> "Future[str | None]":
        """Done when the engine has ended: None after `close`, the reason if it died before."""
        return self._engine.ended

    def check_alive(self) -> None:
        """Raises Unavailable when the engine has died: nothing will work again, and all sessions are lost."""
        reason = self.ended.result() if self.ended.done() else None
        if reason is not None:
            raise Unavailable(reason)

    @property
    def free_slabs(self) -> int:
        """How many more sessions there is room for at this moment."""
        return self._pool.free_count

    # Calls on sessions.

    def create_session(
        self,
        *,
        owner: str = LOCAL_OWNER,
        client_label: str = "",
        eos_token_ids: Sequence[int] | None = None,
        pinned_prefix_tokens: int | None = None,
        request_id: str = "",
    ) -> str:
        """A new empty session; its id. EOS ids default to the model's own."""
        check_label(client_label)
        eos = self.model_config.eos_token_ids if eos_token_ids is None else eos_token_ids

        def create() -> str:
            with self._limits.new_session(owner):
                sequence = self._engine.open(owner, eos, pinned_prefix_tokens)
            return self._keep(sequence, client_label, "session created", request_id)

        return self._answers.once(owner, Call("create", "", request_id), create)

    def append(
        self,
        session_id: str,
        token_ids: Sequence[int],
        expected_history_length: int | None = None,
        *,
        owner: str = LOCAL_OWNER,
        request_id: str = "",
    ) -> int:
        """Add tokens to the history; returns its length. An empty append only refreshes the idle clock."""

        def append() -> int:
            session = self._used(session_id, owner)
            with self._limits.appending(owner, len(token_ids)):
                return self._engine.append(session.sequence, token_ids, expected_history_length)

        return self._answers.once(owner, Call("append", session_id, request_id), append)

    def generate(
        self,
        session_id: str,
        max_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        owner: str = LOCAL_OWNER,
        request_id: str = "",
        constraint: Constraint | None = None,
        prediction: Sequence[int] = (),
    ) -> EventStream:
        """Start a generate; one at a time per session. Read or cancel the stream.

        Only tokens that `constraint` allows are chosen; a constraint serves one generate. A `prediction` of
        the answer makes it faster where it is right, and never changes it. A repeated request
        id gets the events that the reader of the first call took, and the event that ended it. While the
        first call still generates, it raises SessionBusy.
        """

        def start() -> EventStream:
            try:
                session = self._used(session_id, owner)
                params = sampling or SamplingParams()
                stream = self._generate(session, max_tokens, params, request_id, constraint, prediction)
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

    def info(self, session_id: str, *, owner: str = LOCAL_OWNER) -> SessionInfo:
        """What the session holds. Asking does not refresh the idle clock."""
        session = self._store.get(session_id, owner)
        return self._engine.read(session.sequence, session.describe)

    def list_sessions(
        self, *, owner: str = LOCAL_OWNER, page_size: int = 100, page_token: str = ""
    ) -> tuple[list[SessionInfo], str]:
        """The owner's sessions, oldest first, and the token of the next page, empty on the last.

        Whatever comes and goes between pages, a session that stays is listed exactly once.
        """
        sessions, next_page = self._store.page(owner, page_size, page_token)
        if not sessions:
            return [], next_page

        def describe() -> list[SessionInfo]:
            return [each.describe(each.sequence) for each in sessions if not each.is_closed]

        return self._engine.read_all([each.sequence for each in sessions], describe), next_page

    def fork(self, session_id: str, *, owner: str = LOCAL_OWNER, request_id: str = "") -> tuple[str, int]:
        """A new session with the same history, independent from here on; its id and history length."""

        def fork() -> tuple[str, int]:
            session = self._used(session_id, owner)
            with self._limits.new_session(owner):
                copy = self._engine.fork(session.sequence)
            length = copy.committed  # before anybody else can know of it
            return self._keep(copy, session.client_label, "session forked", request_id, session), length

        return self._answers.once(owner, Call("fork", session_id, request_id), fork)

    def close_session(self, session_id: str, *, owner: str = LOCAL_OWNER) -> int:
        """Free the session; returns its final history length."""
        session = self._store.get(session_id, owner)
        if not self._forget(session):
            raise SessionNotFound(f"no session {session_id!r}")
        length = self._engine.close(session.sequence)
        log.info("session closed", extra={"session_id": session_id, "history_length": length})
        return length

    def export_session(
        self, session_id: str, path: Path, *, notes: str = "", owner: str = LOCAL_OWNER
    ) -> None:
        """Write the session's whole state to a file, with a note of the caller's own."""
        session = self._used(session_id, owner)
        with self._pool.transfers, self._engine.using_device():
            state = on_host(self._engine.export_state(session.sequence, notes))
        write_state(path, state)

    def import_session(
        self, path: Path, *, client_label: str = "", owner: str = LOCAL_OWNER
    ) -> tuple[str, str]:
        """A new session that continues an exported one; its id and the note kept with it.

        Raises StateMismatch for a file of another model, geometry or format.
        """
        check_label(client_label)
        state = read_state(path, self.fingerprint, self._pool.geometry)
        with self._pool.transfers, self._engine.using_device():
            moved = on_device(state, self._pool.device)
            with self._limits.new_session(owner):
                sequence = self._engine.import_state(moved, owner)
        return self._keep(sequence, client_label, "session imported"), state.notes

    def sweep(self) -> int:
        """Close sessions that were idle for the configured time; returns how many. Also runs by itself."""
        ttl = self.settings.session_idle_ttl_s
        if ttl is None:
            return 0
        return sum(
            session.idle_seconds >= ttl and self._expire(session, ttl) for session in self._store.all()
        )

    def warm(self, token_ids: Sequence[int]) -> None:
        """Compute a beginning before it is needed: sessions of every owner may copy it, and it is kept.

        Raises ConfigError where it cannot be kept.
        """
        if self.config.share_beginnings is ShareBeginnings.OFF:
            raise ConfigError("a beginning cannot be kept: share_beginnings is off")
        if not self._engine.warm(token_ids):
            needed, held = len(token_ids) * self._facts.bytes_per_token, self._facts.prefix_cache_bytes
            raise ConfigError(
                f"a beginning of {len(token_ids):,} tokens takes {needed:,} bytes and does not fit into the "
                f"{held:,} bytes for beginnings beside those kept before; raise prefix_cache_bytes"
            )

    # Scoring a text, without a session.

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Next-token logits after each token [n, vocab], through the engine, on a temporary session."""
        return self._engine.score(token_ids)

    def score_blocks(self, token_ids: Sequence[int]) -> Generator[Tensor, None, None]:
        """The same a few rows at a time [rows, vocab], so that a long text takes no more memory. Take all of
        them, or close the iterator."""
        return score_blocks(self._engine, token_ids)

    def score_tokens(
        self, token_ids: Sequence[int], top_logprobs: int = 0
    ) -> Generator[list[TokenEvent], None, None]:
        """The tokens with their log-probabilities (the first has none), block by block on a temporary
        session. Take all of them, or close the iterator."""
        return score_tokens(self._engine, token_ids, top_logprobs)

    # The end.

    def drain(self, timeout: float | None = None) -> bool:
        """Refuse new work and wait for what runs; True when all of it ended in time."""
        return self._engine.drain(timeout)

    def close(self, *, drain_timeout: float = 0.0) -> None:
        """Give running work `drain_timeout` seconds, cancel the rest, stop the engine."""
        if self._sweeper is not None:
            self._sweeper.stop()
        if drain_timeout > 0:
            self._engine.drain(drain_timeout)
        self._engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Behind the door.

    def _used(self, session_id: str, owner: str) -> Session:
        """The owner's session, its idle clock refreshed."""
        session = self._store.get(session_id, owner)
        session.touch()
        return session

    def _keep(
        self,
        sequence: TokenSequence,
        label: str,
        message: str,
        request_id: str = "",
        original: Session | None = None,
    ) -> str:
        session = self._store.add(sequence, label)
        if original is not None:
            session.share_past(original)
        ids = {"session_id": session.session_id, "request_id": request_id}
        log.info(message, extra=ids | {"client_label": label})
        return session.session_id

    def _generate(
        self,
        session: Session,
        max_tokens: int,
        sampling: SamplingParams,
        request_id: str,
        constraint: Constraint | None,
        prediction: Sequence[int],
    ) -> EventStream:
        self._limits.start_request(session.owner)
        listener = GenerateListener(session, request_id, self._limits, self.settings.remembered_events)
        try:
            if self._tracing is not None:
                listener.span = self._tracing.generate(session.session_id, request_id, max_tokens, sampling)
            return self._engine.generate(
                session.sequence, max_tokens, sampling, listener, constraint, prediction
            )
        except BaseException as error:
            listener.refused(error)
            raise

    def _expire(self, session: Session, ttl: float) -> bool:
        if not self._engine.close_if(session.sequence, lambda _: session.has_expired(ttl)):
            return False
        log.info("idle session closed", extra={"session_id": session.session_id, "idle_ttl_s": ttl})
        return self._forget(session)

    def _forget(self, session: Session) -> bool:
        """Remove it from the store and from its owner's count; False when another thread has just done so."""
        if not self._store.remove(session):
            return False
        self._limits.session_closed(session.owner)
        return True

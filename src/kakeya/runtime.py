"""The door: the calls that servers, the command line and users make on sessions over one loaded model."""

import hashlib
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torch import Tensor

from kakeya.config import DEFAULT_MODEL, EngineConfig, RuntimeConfig, StateConfig
from kakeya.engine.constraint import Constraint
from kakeya.engine.draft_length import DraftLength
from kakeya.engine.engine import Engine
from kakeya.engine.proposer import Proposer, WorksAhead
from kakeya.engine.scoring import score_blocks, score_tokens
from kakeya.engine.sequence import TokenSequence
from kakeya.engine.state import SequenceState, geometry_name
from kakeya.engine.state_bytes import check_values, decode_state, encode_state
from kakeya.engine.stream import EventStream
from kakeya.errors import ConfigError, Unavailable
from kakeya.loading import LoadedModel, load_model
from kakeya.models.checkpoint import Checkpoint
from kakeya.observer import UNOBSERVED, EngineObserver
from kakeya.proposers.opening import device_drafter, open_proposers
from kakeya.recall.index import Vocabulary
from kakeya.sessions.answers import Answers, Call
from kakeya.sessions.describing import awake, describe_all
from kakeya.sessions.durable import Durable
from kakeya.sessions.generating import Generates, counting_admission
from kakeya.sessions.home import Home
from kakeya.sessions.keeping import Keeping
from kakeya.sessions.lifetimes import Lifetimes
from kakeya.sessions.limits import Limits
from kakeya.sessions.remembering import Language, Remembering
from kakeya.sessions.session import Session, check_label
from kakeya.sessions.state_files import longest_file, read_state, write_state
from kakeya.sessions.store import SessionStore
from kakeya.sessions.sweep import Sweeper
from kakeya.sessions.transfer import Transfer
from kakeya.storage.envelope import contents_of, enveloped
from kakeya.storage.store import StateStore
from kakeya.text import Tokenizer
from kakeya.text.turns import message_start
from kakeya.tracing import Tracing
from kakeya.types import (
    Document,
    RuntimeFacts,
    SamplingParams,
    SessionInfo,
    ShareBeginnings,
    TierFacts,
    TokenEvent,
    TokenRange,
)

if TYPE_CHECKING:
    from kakeya.metrics import Metrics  # a front end's, which brings it

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
        self._observer: EngineObserver = metrics or UNOBSERVED
        self._engine = Engine(model.backend, model.config, proposers, self._observer, draft_length)
        self.config = model.config
        self.settings = settings
        self.tokenizer = model.tokenizer
        self.model_config = model.model_config
        self.fingerprint = model.backend.fingerprint
        self._facts = model.facts
        self.backend = model.backend  # to measure it by itself, while no session generates
        self._pool = model.backend.pool
        self._metrics = metrics
        self._proposers = proposers
        self._store = SessionStore(settings.session_prefix)
        self._limits = Limits(settings.quotas)
        self._answers = Answers(settings.remembered_requests, settings.remembered_events)
        self._sweeper: Sweeper | None = None
        self._keeping = Keeping() if settings.state is None else self._open_state(settings.state)
        self._lifetimes = Lifetimes(self._engine, self._store, self._limits, self._keeping, settings)
        self._transfer = Transfer(self._engine, self._pool, self._limits, self._keeping, self._lifetimes)
        self._generates = Generates(
            self._engine, self._limits, self._keeping, tracing, settings.remembered_events
        )
        self.home = Home(
            self._engine, self._store, self._limits, self._answers, self._keeping, self._lifetimes
        )

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
        as_it_pays: bool = False,
    ) -> Self:
        """Load a model as `load_model` does, and the proposers that `config` names, and start the engine.

        Of guesses by `proposers` that are given instead, all are drafted, or as many `as_it_pays`.
        Without `settings` there are no quotas, and idle sessions are kept.
        Raises ModelError, and ConfigError for a model that does not fit in memory.
        """
        observed = {layer for proposer in proposers or () for layer in proposer.hidden_layers}
        config = config or EngineConfig()
        if proposers is not None:
            loaded = load_model(model, config, name, tokenizer, len(observed))
            length = DraftLength() if as_it_pays else None
            return cls(loaded, settings, metrics, tracing, proposers, length).start()
        loaded = load_model(model, config, name, tokenizer, find_drafter=device_drafter)
        loaded, proposers = open_proposers(loaded)
        return cls(loaded, settings, metrics, tracing, proposers, DraftLength()).start()

    def start(self) -> Self:
        """Start the engine, and what closes idle sessions. Call it once."""
        self._engine.start()
        for session in self._keeping.recovered():
            self._store.restore(session)
            self._limits.session_recovered(session.owner)
        if self._metrics is not None:
            self._metrics.watch_sessions(self._store.count, self._store.live_bytes, self._facts.pool_bytes)
            self._metrics.watch_tiers(self._keeping.tiers)
        if (ttl := self._lifetimes.shortest_ttl) is not None:
            self._sweeper = Sweeper(self.sweep, ttl)
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
        """How many more sessions there is room for at this moment, those included that others would leave."""
        return self._pool.free_count + self._keeping.could_leave

    def recent_queue_seconds(self, within_s: float) -> float:
        """The longest that a generate waited which began in so many seconds; 0 without metrics."""
        return 0.0 if self._metrics is None else self._metrics.recent_queue_seconds(within_s)

    def tiers(self) -> TierFacts | None:
        """Where sessions are, and what sleeping ones take; None without a state directory."""
        return self._keeping.tiers()

    # Calls on sessions.

    def create_session(
        self,
        *,
        owner: str = LOCAL_OWNER,
        client_label: str = "",
        eos_token_ids: Sequence[int] | None = None,
        pinned_prefix_tokens: int | None = None,
        recall_tokens: int = 0,
        holder: str = "",
        request_id: str = "",
    ) -> str:
        """A new empty session; its id. EOS ids default to the model's own.

        With `recall_tokens`, each turn sees up to so many tokens again that have left the window. A front end
        that keeps it for its own clients is its `holder`, and finds it again with `held_sessions`.
        """
        check_label(client_label)
        eos = self.model_config.eos_token_ids if eos_token_ids is None else eos_token_ids
        call = Call("create", "", request_id)

        def create() -> str:
            with self._limits.new_session(owner):
                take = partial(
                    self._engine.open, owner, eos, pinned_prefix_tokens, recall_tokens, self._retriever()
                )
                stored = partial(self._keeping.created, call=call)
                sequence = self._keeping.with_slab(take)
                return self._lifetimes.begin(
                    sequence, client_label, "session created", stored, request_id, holder=holder
                )

        return self._answers.once(owner, call, create)

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
        call = Call("append", session_id, request_id)

        def append() -> int:
            session = self._used(session_id, owner)
            with self._limits.appending(owner, len(token_ids)), self._keeping.working(session) as sequence:
                length = self._engine.append(sequence, token_ids, expected_history_length)
                try:
                    self._keeping.appended(session, length, token_ids, call)
                except BaseException:
                    self._engine.take_back(sequence, length - len(token_ids))
                    raise
                return length

        return self._answers.once(owner, call, append)

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

        call = Call("generate", session_id, request_id)

        def start() -> EventStream:
            with counting_admission(self._observer):
                session = self._used(session_id, owner)
                params = sampling or SamplingParams()
                return self._generates.start(session, max_tokens, params, call, constraint, prediction)

        def tell_again(first: EventStream) -> EventStream:
            return self._generates.tell_again(self._store.get(session_id, owner), first)

        return self._answers.once(owner, call, start, tell_again)

    def recall(
        self,
        session_id: str,
        ranges: Sequence[TokenRange],
        *,
        remember: bool = False,
        owner: str = LOCAL_OWNER,
        request_id: str = "",
    ) -> tuple[TokenRange, ...]:
        """Let the next turn see these ranges of the history again, instead of what would be searched for.

        With `remember`, they take the place of those remembered so far: every later turn that does not see
        them brings them back, whatever else it searches for. Returns what the next turn is known to bring
        back. Raises InvalidArgument for ranges outside the history, in sight, that overlap or that are longer
        than `recall_tokens`, and for a session without recall.
        """

        call = Call("recall", session_id, request_id)

        def name() -> tuple[TokenRange, ...]:
            session = self._used(session_id, owner)
            with self._keeping.working(session) as sequence:
                named = self._engine.recall(sequence, ranges, remember=remember)
                try:
                    self._keeping.recalled(session, named, call)
                except BaseException:
                    self._engine.take_back_recall(sequence)
                    raise
                return named

        return self._answers.once(owner, call, name)

    def info(self, session_id: str, *, owner: str = LOCAL_OWNER) -> SessionInfo:
        """What the session holds. Asking does not refresh the idle clock."""
        session = self._store.get(session_id, owner)
        return self._engine.read_all(awake([session]), session.describe)

    def recalled(self, session_id: str, *, owner: str = LOCAL_OWNER) -> dict[TokenRange, str]:
        """What the session sees of its past beside its window, as text, in order of time."""
        session = self._store.get(session_id, owner)

        def look(sequence: TokenSequence) -> dict[TokenRange, tuple[int, ...]]:
            ranges = session.describe().recalled
            return dict(zip(ranges, sequence.tokens_of(ranges), strict=True))

        with self._keeping.working(session) as sequence:
            found = self._engine.read(sequence, look)
        return {each: self.tokenizer.decode(token_ids) for each, token_ids in found.items()}

    def list_sessions(
        self, *, owner: str = LOCAL_OWNER, page_size: int = 100, page_token: str = ""
    ) -> tuple[list[SessionInfo], str]:
        """The owner's sessions, oldest first, and the token of the next page, empty on the last.

        Whatever comes and goes between pages, a session that stays is listed exactly once.
        """
        sessions, next_page = self._store.page(owner, page_size, page_token)
        return [info for _, info in describe_all(self._engine, sessions)], next_page

    def fork(
        self, session_id: str, *, owner: str = LOCAL_OWNER, holder: str = "", request_id: str = ""
    ) -> tuple[str, int]:
        """A new session with the same history, independent from here on; its id and history length."""
        call = Call("fork", session_id, request_id)

        def fork() -> tuple[str, int]:
            session = self._used(session_id, owner)
            with self._limits.new_session(owner), self._keeping.working(session) as sequence:
                copy = self._keeping.with_slab(lambda: self._engine.fork(sequence))
                length = copy.committed  # before anybody else can know of it
                stored = partial(self._keeping.forked, original=session, call=call)
                label = session.client_label
                message = "session forked"
                name = self._lifetimes.begin(copy, label, message, stored, request_id, session, holder)
                return name, length

        return self._answers.once(owner, call, fork)

    def close_session(self, session_id: str, *, owner: str = LOCAL_OWNER) -> int:
        """Free the session; returns its final history length."""
        return self._lifetimes.end(self._store.get(session_id, owner))

    def export_session(
        self, session_id: str, path: Path, *, notes: str = "", owner: str = LOCAL_OWNER
    ) -> None:
        """Write the session's whole state to a file, as `export_bytes` tells it, with a note of the caller's
        own."""
        write_state(path, self._transfer.take_out(self._used(session_id, owner), notes))

    def import_session(
        self, path: Path, *, client_label: str = "", owner: str = LOCAL_OWNER
    ) -> tuple[str, str]:
        """A new session that continues an exported one; its id and the note kept with it.

        The file may come from anywhere. Raises StateMismatch unless it is whole and fits this model.
        """
        check_label(client_label)
        state = read_state(path, self.fingerprint, self._pool.geometry)
        return self._bring_in(state, client_label, owner), state.notes

    @property
    def longest_import(self) -> int:
        """The most bytes that a session's file can have here."""
        return longest_file(self._pool.geometry)

    def export_bytes(self, session_id: str, *, owner: str = LOCAL_OWNER) -> list[bytes | memoryview]:
        """The session's whole state as the parts of a file, with a digest. See `import_bytes`."""
        return enveloped(*encode_state(self._transfer.take_out(self._used(session_id, owner))))

    def import_bytes(
        self,
        file: bytes | bytearray,
        *,
        client_label: str = "",
        owner: str = LOCAL_OWNER,
        request_id: str = "",
    ) -> tuple[str, int]:
        """A new session that continues an exported one; its id and history length.

        The file may come from anywhere. Raises StateMismatch unless it is whole and fits this model.
        """
        check_label(client_label)

        def bring_in() -> tuple[str, int]:
            state = decode_state(contents_of(file), "the file", self.fingerprint, self._pool.geometry)
            check_values(state, "the file")
            return self._bring_in(state, client_label, owner, request_id), len(state.tokens)

        return self._answers.once(owner, Call("import", "", request_id), bring_in)

    # In a cluster; the rest is in `home`.

    @property
    def shape(self) -> str:
        """A short name of the weights and of the form of a session's memory: one moves between servers that
        have the same."""
        form = f"{self.fingerprint} {geometry_name(self._pool.geometry, spare=False)}"
        return hashlib.sha256(form.encode()).hexdigest()[:16]

    def learn_proposers(self, addresses: Sequence[str]) -> None:
        """Where all remote proposers are now. Without any from the start there is nobody to learn it."""
        for proposer in self._proposers:
            if isinstance(proposer, WorksAhead):
                proposer.learn(addresses)

    # What front ends keep for their own clients.

    def held_sessions(self, holder: str) -> dict[str, tuple[str, int]]:
        """The owners and history lengths of a front end's sessions, by id."""
        sessions = [each for each in self._store.all() if each.holder == holder]
        return {each.session_id: (each.owner, each.length) for each in sessions}

    @property
    def has_documents(self) -> bool:
        """Whether there is a state directory, in which documents can be kept."""
        return self._keeping.has_documents

    def documents(self, kind: str) -> list[Document]:
        """The documents of a kind, of all owners, least recently used first. Raises StateDamaged, and
        ConfigError without a state directory."""
        return self._keeping.documents(kind)

    def change_documents(
        self, put: Sequence[Document], delete: Sequence[tuple[str, str]] = ()
    ) -> "Future[None]":
        """Store documents and delete others, by kind and name, at once. Done when that is stored, or
        StorageFailed, and then nothing has changed. Raises ConfigError without a state directory."""
        return self._keeping.change_documents(put, delete)

    def idle_since(self, used_at: float) -> float:
        """Seconds since that time of the system's clock, as far as clocks can be trusted."""
        return self._keeping.idle_since(used_at)

    @property
    def retention_s(self) -> float | None:
        """For how long something is kept that nobody uses; None for ever."""
        return self._lifetimes.retention_s

    def sweep(self) -> int:
        """Close sessions that were idle for the configured time; returns how many. Also runs by itself."""
        return self._lifetimes.sweep()

    def warm(self, token_ids: Sequence[int]) -> None:
        """Compute a prefix before it is needed: sessions of every owner may copy it, and it is kept.

        Raises ConfigError where it cannot be kept.
        """
        if self.config.share_beginnings is ShareBeginnings.OFF:
            raise ConfigError("a prefix cannot be kept: share_beginnings is off")
        if not self._engine.warm(token_ids):
            needed, held = len(token_ids) * self._facts.bytes_per_token, self._facts.prefix_cache_bytes
            raise ConfigError(
                f"a prefix of {len(token_ids):,} tokens takes {needed:,} bytes and does not fit into the "
                f"{held:,} bytes for prefixes beside those kept before; raise prefix_cache_bytes"
            )

    # Scoring a text, without a session.

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Next-token logits after each token [n, vocab], through the engine, on a temporary session."""
        return self._keeping.with_slab(partial(self._engine.score, token_ids))

    def score_blocks(self, token_ids: Sequence[int]) -> Generator[Tensor, None, None]:
        """The same a few rows at a time [rows, vocab], so that a long text takes no more memory. Take all of
        them, or close the iterator."""
        self._keeping.with_slab(self._engine.moves.check_free)
        return score_blocks(self._engine, token_ids)

    def score_tokens(
        self, token_ids: Sequence[int], top_logprobs: int = 0
    ) -> Generator[list[TokenEvent], None, None]:
        """The tokens with their log-probabilities (the first has none), block by block on a temporary
        session. Take all of them, or close the iterator."""
        self._keeping.with_slab(self._engine.moves.check_free)
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
        self._engine.cancel_all()  # so that these sessions can be put to sleep, too
        self._keeping.close()
        self._engine.shutdown()
        self._keeping.end()
        for proposer in self._proposers:
            if isinstance(proposer, WorksAhead):
                proposer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Behind the door.

    def _open_state(self, config: StateConfig) -> Keeping:
        """The state directory, and what earlier processes have answered. Raises ConfigError."""
        store = StateStore(config, self.settings.remembered_requests)
        try:
            block = self.config.block_tokens
            durable = Durable(
                store,
                self._engine,
                self._pool,
                self.fingerprint,
                block,
                self._store,
                self._observer,
                self._retriever,
            )
            durable.recall_answers(self._answers)
        except BaseException:
            store.close()
            raise
        return durable

    def _retriever(self) -> Remembering:
        """Finds what a session should see again."""
        return Remembering(lambda: self._language)

    @cached_property
    def _language(self) -> Language:
        pieces = self.tokenizer.pieces(self.model_config.vocab_size)
        return Language(Vocabulary(pieces), message_start(self.tokenizer))

    def _used(self, session_id: str, owner: str) -> Session:
        """The owner's session, its idle clock refreshed."""
        session = self._store.get(session_id, owner)
        session.touch()
        return session

    def _bring_in(self, state: SequenceState, label: str, owner: str, request_id: str = "") -> str:
        return self._transfer.bring_in(state, label, owner, self._retriever(), request_id)

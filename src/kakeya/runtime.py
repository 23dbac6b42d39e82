"""Wires the rooms together: a model, an engine, a tokenizer and the sessions over them."""

import ctypes
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from torch import Tensor

from kakeya.config import DEFAULT_MODEL, EngineConfig, RuntimeConfig
from kakeya.engine.constraint import Constraint
from kakeya.engine.engine import Engine
from kakeya.engine.observer import Unobserved
from kakeya.engine.opening import OpenedBackend, chosen_backend, open_backend
from kakeya.engine.proposer import Proposer
from kakeya.engine.scoring import score_blocks, score_tokens
from kakeya.engine.state import on_device, on_host, read_state, write_state
from kakeya.engine.stream import EventStream
from kakeya.errors import Unavailable
from kakeya.models.catalogue import resolve
from kakeya.models.checkpoint import Checkpoint, open_checkpoint
from kakeya.models.config import ModelConfig
from kakeya.sessions import SessionDesk, Sweeper
from kakeya.text import Tokenizer
from kakeya.tracing import Tracing
from kakeya.types import RuntimeFacts, SamplingParams, SessionInfo, TokenEvent

if TYPE_CHECKING:
    from kakeya.metrics import Metrics  # a front end's, which brings it

LOCAL_OWNER = "local"
# Who talks to a runtime in its own process closes its sessions itself.
_LOCAL = RuntimeConfig(session_idle_ttl_s=None)


class Runtime:
    """Sessions over one loaded model: create, append, generate, info, close.

    Methods may be called from any thread; each waits for the engine, at most one step. A session is
    its owner's alone: to others it is SessionNotFound. Calls that go beyond an owner's quotas raise
    ResourceExhausted. A repeated `request_id` gets the first answer, and nothing is done twice.
    Use it as a context manager, or call `close`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        config: EngineConfig,
        *,
        model: str = "",
        path: str = "",
        proposer: Proposer | None = None,
        settings: RuntimeConfig = _LOCAL,
        metrics: "Metrics | None" = None,
        tracing: Tracing | None = None,
    ) -> None:
        config = chosen_backend(config)
        opened = open_backend(checkpoint, config, len(proposer.hidden_layers) if proposer else 0)
        self.config = config
        self.settings = settings
        self.tokenizer = tokenizer
        self.model_config = checkpoint.config
        self.fingerprint = opened.backend.fingerprint
        self._pool = opened.backend.pool
        observer = metrics or Unobserved()
        self._engine = Engine(opened.backend, config, proposer, observer)
        self._desk = SessionDesk(self._engine, settings, observer, tracing)
        self._facts = _facts(opened, self.model_config, config, model, path)
        if metrics is not None:
            metrics.watch_sessions(self._desk.count, self._desk.live_bytes, self._facts.pool_bytes)
        self._sweeper = None
        if settings.session_idle_ttl_s is not None:
            self._sweeper = Sweeper(self._desk.sweep, settings.session_idle_ttl_s)

    @classmethod
    def open(
        cls,
        model: str = DEFAULT_MODEL,
        config: EngineConfig | None = None,
        settings: RuntimeConfig = _LOCAL,
        metrics: "Metrics | None" = None,
        tracing: Tracing | None = None,
    ) -> Self:
        """Load a catalogue name, a path or a hub id, fetching it first if need be.

        Without `settings` there are no quotas, and idle sessions are kept. Raises ModelError, and ConfigError
        for a model of the catalogue that does not fit in memory.
        """
        config = config or EngineConfig()
        path = resolve(model, config=config)
        checkpoint = open_checkpoint(path)
        runtime = cls(
            checkpoint,
            Tokenizer(checkpoint.tokenizer_files()),
            config,
            model=model,
            path=str(path),
            settings=settings,
            metrics=metrics,
            tracing=tracing,
        )
        del checkpoint  # with its vocabulary as Python's strings
        give_back_memory()
        return runtime

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
        eos = self.model_config.eos_token_ids if eos_token_ids is None else eos_token_ids
        return self._desk.create(owner, client_label, eos, pinned_prefix_tokens, request_id)

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
        return self._desk.append(session_id, token_ids, expected_history_length, owner, request_id)

    def generate(
        self,
        session_id: str,
        max_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        owner: str = LOCAL_OWNER,
        request_id: str = "",
        constraint: Constraint | None = None,
    ) -> EventStream:
        """Start a generate; one at a time per session. Read or cancel the stream.

        Only tokens that a `constraint` allows are chosen; it is used up. A repeated request id gets the
        events that the first call's reader took and the event that ended it; while the first still
        generates it raises SessionBusy.
        """
        sampling = sampling or SamplingParams()
        return self._desk.generate(session_id, max_tokens, sampling, owner, request_id, constraint)

    def info(self, session_id: str, *, owner: str = LOCAL_OWNER) -> SessionInfo:
        """What the session holds. Asking does not refresh the idle clock."""
        return self._desk.info(session_id, owner)

    def list_sessions(
        self, *, owner: str = LOCAL_OWNER, page_size: int = 100, page_token: str = ""
    ) -> tuple[list[SessionInfo], str]:
        """The owner's sessions, oldest first, and the token of the next page, empty on the last."""
        return self._desk.page(owner, page_size, page_token)

    def fork(self, session_id: str, *, owner: str = LOCAL_OWNER, request_id: str = "") -> str:
        """A new session with the same history, independent from here on."""
        return self._desk.fork(session_id, owner, request_id)

    def close_session(self, session_id: str, *, owner: str = LOCAL_OWNER) -> int:
        """Free the session; returns its final history length."""
        return self._desk.close(session_id, owner)

    def export_session(
        self, session_id: str, path: Path, *, notes: str = "", owner: str = LOCAL_OWNER
    ) -> None:
        """Write the session's whole state to a file, with a note of the caller's own."""
        session = self._desk.used(session_id, owner)
        with self._pool.transfers, self._engine.using_device():
            state = on_host(self._engine.export_state(session.sequence, notes))
        write_state(path, state)

    def import_session(
        self, path: Path, *, client_label: str = "", owner: str = LOCAL_OWNER
    ) -> tuple[str, str]:
        """A new session that continues an exported one; its id and the note kept with it.

        Raises StateMismatch for a file of another model, geometry or format.
        """
        state = read_state(path, self.fingerprint, self._pool.geometry)
        with self._pool.transfers, self._engine.using_device():
            moved = on_device(state, self._pool.device)
            return self._desk.adopt(moved, owner, client_label), state.notes

    def sweep(self) -> int:
        """Close the sessions that are idle for too long; how many they were. Runs by itself as well."""
        return self._desk.sweep()

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Next-token logits after each token [n, vocab], through the engine, on a temporary session."""
        return self._engine.score(token_ids)

    def score_blocks(self, token_ids: Sequence[int]) -> Generator[Tensor, None, None]:
        """The same some rows at a time [rows, vocab], so that a long text takes no more memory. Take them
        all, or close the iterator."""
        return score_blocks(self._engine, token_ids)

    def score_tokens(
        self, token_ids: Sequence[int], top_logprobs: int = 0
    ) -> Generator[list[TokenEvent], None, None]:
        """The tokens with their log-probabilities, the first with none, in blocks as they are computed on a
        temporary session. Take them all, or close the iterator."""
        return score_tokens(self._engine, token_ids, top_logprobs)

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def give_back_memory() -> None:
    """Return to the system what loading has freed: glibc keeps hundreds of megabytes of it otherwise."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _facts(
    opened: OpenedBackend, model_config: ModelConfig, config: EngineConfig, model: str, path: str
) -> RuntimeFacts:
    pool = opened.backend.pool
    return RuntimeFacts(
        model=model,
        path=path,
        family=model_config.family,
        parameters=opened.parameters,
        weights=opened.weights,
        dtype=config.dtype.value,
        numerics=config.numerics.value,
        kernels=opened.kernels,
        threads=config.threads,
        sink=config.cache.sink,
        window=config.cache.window,
        capacity=config.capacity,
        bytes_per_token=pool.geometry.bytes_per_token,
        session_bytes=pool.geometry.slab_bytes,
        pool_bytes=pool.storage.nbytes,
        backend=config.backend.value,
    )

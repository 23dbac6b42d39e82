"""Wires the rooms together: a model, an engine, a tokenizer and the sessions over them."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from kakeya import kernels as native
from kakeya.config import DEFAULT_MODEL, EngineConfig
from kakeya.engine.engine import Engine
from kakeya.engine.proposer import Proposer
from kakeya.engine.runner import CpuBackend
from kakeya.engine.slab import SlabGeometry, SlabPool
from kakeya.engine.state import read_state, write_state
from kakeya.engine.stream import EventStream
from kakeya.models.catalogue import resolve
from kakeya.models.checkpoint import Checkpoint, open_checkpoint
from kakeya.models.decoder import Decoder
from kakeya.models.loader import load_decoder
from kakeya.sessions import Session, SessionStore
from kakeya.text import Tokenizer
from kakeya.types import RuntimeFacts, SamplingParams, SessionInfo

LOCAL_OWNER = "local"


class Runtime:
    """Sessions over one loaded model: create, append, generate, info, close.

    Methods may be called from any thread. Use it as a context manager, or call `close`.
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
    ) -> None:
        torch.set_num_threads(config.threads)
        kernels = native.load(config.kernels)
        if kernels is not None:
            kernels.set_threads(config.threads)
        decoder = load_decoder(
            checkpoint, dtype=config.dtype, weights=config.weights, numerics=config.numerics, kernels=kernels
        )
        self.config = config
        self.tokenizer = tokenizer
        self.model_config = decoder.config
        self._pool = SlabPool(_geometry(decoder, config), config.capacity)
        self._fingerprint = f"{checkpoint.fingerprint}/{decoder.describe_weights()}"
        backend = CpuBackend(decoder, self._pool, config.numerics, kernels, self._fingerprint)
        self._engine = Engine(backend, config, proposer)
        self._store = SessionStore()
        self._facts = _facts(decoder, self._pool, config, kernels, model, path)

    @classmethod
    def open(cls, model: str = DEFAULT_MODEL, config: EngineConfig | None = None) -> Self:
        """Load a catalogue name, a path or a hub id, fetching it first if need be."""
        path = resolve(model)
        checkpoint = open_checkpoint(path)
        tokenizer = Tokenizer(checkpoint.tokenizer_files())
        return cls(checkpoint, tokenizer, config or EngineConfig(), model=model, path=str(path))

    def describe(self) -> RuntimeFacts:
        """What was loaded and how it runs."""
        return self._facts

    def create_session(
        self,
        *,
        owner: str = LOCAL_OWNER,
        client_label: str = "",
        eos_token_ids: Sequence[int] | None = None,
        pinned_prefix_tokens: int | None = None,
    ) -> str:
        """A new empty session; its id. EOS ids default to the model's own."""
        eos = self.model_config.eos_token_ids if eos_token_ids is None else eos_token_ids
        sequence = self._engine.open(owner, eos, pinned_prefix_tokens)
        return self._store.add(sequence, client_label).session_id

    def append(
        self,
        session_id: str,
        token_ids: Sequence[int],
        expected_history_length: int | None = None,
        *,
        owner: str = LOCAL_OWNER,
    ) -> int:
        """Add tokens to the history; returns its length. An empty append only refreshes the idle clock."""
        session = self._session(session_id, owner)
        return self._engine.append(session.sequence, token_ids, expected_history_length)

    def generate(
        self,
        session_id: str,
        max_tokens: int,
        sampling: SamplingParams | None = None,
        *,
        owner: str = LOCAL_OWNER,
    ) -> EventStream:
        """Start a generate; one at a time per session. Read or cancel the stream."""
        session = self._session(session_id, owner)
        return self._engine.generate(session.sequence, max_tokens, sampling or SamplingParams())

    def info(self, session_id: str, *, owner: str = LOCAL_OWNER) -> SessionInfo:
        """What the session holds. Asking does not refresh the idle clock."""
        session = self._store.get(session_id, owner)
        return self._engine.read(session.sequence, session.describe)

    def fork(self, session_id: str, *, owner: str = LOCAL_OWNER) -> str:
        """A new session with the same history, independent from here on."""
        session = self._session(session_id, owner)
        return self._store.add(self._engine.fork(session.sequence), session.client_label).session_id

    def close_session(self, session_id: str, *, owner: str = LOCAL_OWNER) -> int:
        """Free the session; returns its final history length."""
        session = self._store.get(session_id, owner)
        self._store.remove(session)
        return self._engine.close(session.sequence)

    def export_session(
        self, session_id: str, path: Path, *, notes: str = "", owner: str = LOCAL_OWNER
    ) -> None:
        """Write the session's whole state to a file, with a note of the caller's own."""
        session = self._session(session_id, owner)
        write_state(path, self._engine.export_state(session.sequence, notes))

    def import_session(
        self, path: Path, *, client_label: str = "", owner: str = LOCAL_OWNER
    ) -> tuple[str, str]:
        """A new session that continues an exported one; its id and the note kept with it.

        Raises StateMismatch for a file of another model, geometry or format.
        """
        state = read_state(path, self._fingerprint, self._pool.geometry)
        sequence = self._engine.import_state(state, owner)
        return self._store.add(sequence, client_label).session_id, state.notes

    def score(self, token_ids: Sequence[int]) -> Tensor:
        """Next-token logits after each token [n, vocab], through the engine, on a temporary session."""
        return self._engine.score(token_ids)

    def close(self, *, drain_timeout: float = 0.0) -> None:
        """Give running work `drain_timeout` seconds, cancel the rest, stop the engine."""
        if drain_timeout > 0:
            self._engine.drain(drain_timeout)
        self._engine.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _session(self, session_id: str, owner: str) -> Session:
        session = self._store.get(session_id, owner)
        session.touch()
        return session


def _geometry(decoder: Decoder, config: EngineConfig) -> SlabGeometry:
    model = decoder.config
    return SlabGeometry(model.num_layers, model.num_kv_heads, model.head_dim, config.cache, config.dtype)


def _facts(
    decoder: Decoder,
    pool: SlabPool,
    config: EngineConfig,
    kernels: native.Kernels | None,
    model: str,
    path: str,
) -> RuntimeFacts:
    geometry = pool.geometry
    return RuntimeFacts(
        model=model,
        path=path,
        family=decoder.config.family,
        parameters=decoder.num_parameters,
        weights=decoder.describe_weights(),
        dtype=config.dtype.value,
        numerics=config.numerics.value,
        kernels=f"native ({kernels.isa})" if kernels is not None else "torch",
        threads=config.threads,
        sink=config.cache.sink,
        window=config.cache.window,
        capacity=config.capacity,
        bytes_per_token=geometry.bytes_per_token,
        session_bytes=geometry.slab_bytes,
        pool_bytes=pool.storage.nbytes,
    )

"""`kakeya bench session`: one session through many turns over gRPC, and what a turn costs as it grows."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kakeya.bench.interrupts import Interruption, interruptible
from kakeya.bench.machine import Bystanders, machine_facts, public_name
from kakeya.bench.messages import Messages
from kakeya.bench.processes import resident_bytes_of, share_of
from kakeya.bench.report import Report, now
from kakeya.bench.server_process import server_process
from kakeya.bench.session_results import Limits, Turn, session_results
from kakeya.client import AsyncClient, AsyncSession, ServerInfo
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError, KakeyaError, SessionNotFound

DEFAULT_DURATION_S = 1800.0
# A turn that hangs is an error in the end, and after an error the server gets a moment.
TURN_TIMEOUT_S = 600.0
PAUSE_AFTER_ERROR_S = 1.0

Progress = Callable[[float, str], None]
Checkpoint = Callable[[Report], object]


@dataclass(frozen=True)
class SessionBench:
    """What to say, how often, until when. Whichever end comes first ends the run.

    Without `duration_s`, `turns` and `target_history_tokens` it lasts half an hour. Without
    `grpc_address` it starts a server of its own from `model` and `config`. Raises ConfigError.
    """

    model: str
    config: EngineConfig
    grpc_address: str | None = None
    api_key: str | None = None
    server_pid: int | None = None
    duration_s: float | None = None
    turns: int | None = None
    target_history_tokens: int | None = None
    turn_spacing_s: float = 0.0
    max_tokens: int = 64
    message_tokens: int = 64
    seed: int = 0
    checkpoint_every_s: float = 600.0
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        for name in ("duration_s", "turns", "target_history_tokens", "checkpoint_every_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{_flag(name)} must be above 0, got {value}")
        for name in ("max_tokens", "message_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} must be at least 1, got {getattr(self, name)}")
        if self.turn_spacing_s < 0:
            raise ConfigError(f"turn-spacing-s must not be negative, got {self.turn_spacing_s}")
        if self.server_pid is not None and resident_bytes_of(self.server_pid) is None:
            raise ConfigError(f"server-pid must be a running process, got {self.server_pid}")
        if self.duration_s is self.turns is self.target_history_tokens is None:
            object.__setattr__(self, "duration_s", DEFAULT_DURATION_S)

    def fractions_done(self, elapsed_s: float, turns: int, history: int) -> dict[str, float]:
        """How far the run is towards each of its ends."""
        ends = {
            "duration": (elapsed_s, self.duration_s),
            "turns": (turns, self.turns),
            "target history": (history, self.target_history_tokens),
        }
        return {name: value / end for name, (value, end) in ends.items() if end is not None}


def _flag(name: str) -> str:
    return {"checkpoint_every_s": "partial-checkpoint-every-s"}.get(name, name.replace("_", "-"))


def run(bench: SessionBench, progress: Progress, checkpoint: Checkpoint) -> Report:
    """Talk until the end, or until SIGINT or SIGTERM, and return the finished report.

    `progress` is told how far the run is, 0 to 1, and `checkpoint` gets partial reports now and then. A turn
    that fails is recorded, and the run goes on. Raises ConfigError when no server can be had, and
    what the client raises when it cannot be talked to at all.
    """
    return asyncio.run(_run(bench, progress, checkpoint))


async def _run(bench: SessionBench, progress: Progress, checkpoint: Checkpoint) -> Report:
    progress(0.0, "starting")
    async with _served(bench) as (client, info, pid):
        report = Report("session", _settings(bench, info), machine_facts())
        tokenizer = await client.tokenizer
        messages = Messages(tokenizer.encode, bench.message_tokens, bench.seed)
        with interruptible() as interruption:
            talk = _Talk(bench, client, messages, pid, interruption)
            await talk.hold(progress, lambda partial: checkpoint(replace(report, **partial)))
        return replace(report, **talk.findings(), finished_at=now())


@asynccontextmanager
async def _served(bench: SessionBench) -> AsyncIterator[tuple[AsyncClient, ServerInfo, int | None]]:
    """A client of the server that was named, or of one of our own; what it runs, and its process if known."""
    if bench.grpc_address is not None:
        async with AsyncClient(bench.grpc_address, api_key=bench.api_key) as client:
            yield client, await client.server_info(), bench.server_pid
    else:
        async with (
            server_process(bench.model, bench.config) as (server, info),
            AsyncClient(server.address) as client,
        ):
            yield client, info, server.pid


def _settings(bench: SessionBench, info: ServerInfo) -> dict[str, Any]:
    settings = asdict(replace(bench, model=public_name(bench.model)))
    del settings["api_key"], settings["server_pid"]
    if bench.grpc_address is not None:
        # The server was there before us: what it runs is what it says, not what we were asked for.
        del settings["model"], settings["config"]
    server = {**asdict(info), "model_id": public_name(info.model_id)}
    return {**settings, "sampling": "greedy, no end of sequence", "server": server}


class _Talk:
    """The conversation: its session, and the turns so far."""

    def __init__(
        self,
        bench: SessionBench,
        client: AsyncClient,
        messages: Messages,
        pid: int | None,
        interruption: Interruption,
    ) -> None:
        self._bench = bench
        self._client = client
        self._messages = messages
        self._pid = pid
        self._interruption = interruption
        self._session: AsyncSession | None = None
        self._sessions_opened = 0
        self._turns: list[Turn] = []
        self._history = 0
        self._ended_by: str | None = None
        # A server whose process is not known would count as a bystander itself.
        self._bystanders = None if pid is None else Bystanders([os.getpid(), pid])
        self._began = time.perf_counter()

    async def hold(self, progress: Progress, checkpoint: Callable[[dict[str, Any]], object]) -> None:
        """Turn after turn until an end is reached or somebody asks for one; then the session is closed."""
        written = 0.0
        while not self._is_over(progress):
            started = self._elapsed()
            turn = await self._interruption.unless_asked(self._turn())
            if turn is None:
                break
            self._turns.append(turn)
            if self._elapsed() - written >= self._bench.checkpoint_every_s:
                written = self._elapsed()
                checkpoint(self.findings())
            spacing = max(self._bench.turn_spacing_s, 0.0 if turn.ok else PAUSE_AFTER_ERROR_S)
            await self._interruption.sleep(started + spacing - self._elapsed())
        await self._leave()

    def findings(self) -> dict[str, Any]:
        """The report's results and gates as they are now."""
        others = None if self._bystanders is None else share_of(self._bystanders)
        results, gates = session_results(self._turns, self._elapsed(), self._bench.limits, others)
        more = {
            "ended_by": self._ended_by,
            "abort_reason": self._interruption.reason,
            "sessions_opened": self._sessions_opened,
        }
        return {"results": {**more, **results}, "gates": gates}

    def _is_over(self, progress: Progress) -> bool:
        """Whether an end is reached; says how far we are."""
        done = self._bench.fractions_done(self._elapsed(), len(self._turns), self._history)
        nearest = max(done, key=lambda name: done[name])
        progress(min(1.0, done[nearest]), f"turn {len(self._turns) + 1:,}, {self._history:,} tokens")
        if done[nearest] >= 1.0:
            self._ended_by = nearest
        return self._ended_by is not None or self._interruption.reason is not None

    async def _turn(self) -> Turn:
        text = self._messages.next_text()
        began = self._elapsed()
        try:
            measured = await self._say(text)
        except KakeyaError as error:
            if isinstance(error, SessionNotFound):
                self._session = None
            name = type(error).__name__
            return Turn(began, self._bench.message_tokens, error_class=name, error_str=str(error))
        self._history = measured["history_length"]
        rss = None if self._pid is None else resident_bytes_of(self._pid)
        return Turn(began, self._bench.message_tokens, server_rss_bytes=rss, **measured)

    async def _say(self, text: str) -> dict[str, Any]:
        """One turn, from the message's text to the answer's last token, and what the session holds then."""
        session = await self._opened()
        began = time.perf_counter()
        await session.append(self._messages.encoded(text))
        first, count = None, 0
        async for _ in session.generate(self._bench.max_tokens, timeout=TURN_TIMEOUT_S):
            first = first or time.perf_counter()
            count += 1
        latency = time.perf_counter() - began
        info = await session.info()
        return {
            "latency_s": latency,
            "ttft_s": None if first is None else first - began,
            "n_emitted": count,
            "kv_live_bytes": info.kv_live_bytes,
            "history_length": info.history_length,
            "dropped_token_count": info.dropped_token_count,
        }

    async def _opened(self) -> AsyncSession:
        """The session; a new one at the beginning, and when the server has lost it."""
        if self._session is None:
            self._session = await self._client.create_session(label="bench session", ignore_eos=True)
            self._sessions_opened += 1
        return self._session

    async def _leave(self) -> None:
        try:
            if self._session is not None:
                await self._session.close()
        except KakeyaError:
            pass  # the turns have told what there is to tell about this server

    def _elapsed(self) -> float:
        return time.perf_counter() - self._began

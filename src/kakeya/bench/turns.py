"""`kakeya bench turns`: one conversation by several ways of holding it, and what each turn costs."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kakeya.bench.contestants import ChatContestant, Contestant, ResponsesContestant
from kakeya.bench.contestants_llama import TRAINED_CONTEXT, LlamaServer, require_llama_server
from kakeya.bench.contestants_transformers import TransformersContestant, require_transformers
from kakeya.bench.interrupts import interruptible
from kakeya.bench.machine import Bystanders, machine_facts, public_name
from kakeya.bench.messages import Messages
from kakeya.bench.processes import share_of
from kakeya.bench.report import Report, now
from kakeya.bench.server_process import ServerProcess, server_process
from kakeya.bench.turns_results import (
    FLAT_LIMIT,
    LLAMA,
    MATCHED,
    RESPONSES,
    TRANSFORMERS,
    UNMATCHED,
    turns_gates,
    turns_results,
)
from kakeya.bench.turns_talk import Ends, Progress, Talk
from kakeya.client import AsyncClient, ServerInfo
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError

# Sessions of our servers: the conversations, and the branch points that the Responses API leaves behind.
CAPACITY = 8
NO_MATCHING = ("--no-chat-matching",)

Checkpoint = Callable[[Report], object]


@dataclass(frozen=True)
class TurnsBench:
    """Who talks, how long and about what. `model_path` is where the model lies, for the peers.

    `transformers_turns` is for how long transformers takes part, 0 for not at all. Raises ConfigError.
    """

    model: str
    model_path: str
    config: EngineConfig
    ways: tuple[str, ...] = (RESPONSES, MATCHED, UNMATCHED)
    llama: bool = True
    llama_server: str | None = None
    llama_context: int = TRAINED_CONTEXT
    transformers_turns: int = 0
    turns: int = 200
    max_tokens: int = 32
    message_tokens: int = 32
    seed: int = 0
    checkpoint_every_s: float = 600.0
    limit: float = FLAT_LIMIT

    def __post_init__(self) -> None:
        for name in ("turns", "max_tokens", "message_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for name in ("llama_context", "transformers_turns"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")
        if self.checkpoint_every_s <= 0:
            raise ConfigError(f"partial-checkpoint-every-s must be above 0, got {self.checkpoint_every_s}")
        if not self.ways:
            raise ConfigError("one of our own ways must take part")
        if self.llama:
            require_llama_server(self.model_path, self.llama_server)
        if self.transformers_turns:
            require_transformers(self.model_path)


@dataclass
class Cast:
    """Who takes part, what each is, and the processes that they run in."""

    info: ServerInfo
    client: AsyncClient
    contestants: list[Contestant] = field(default_factory=list)
    software: dict[str, dict[str, Any]] = field(default_factory=dict)
    pids: list[int] = field(default_factory=lambda: [os.getpid()])

    @property
    def slab_tokens(self) -> int:
        return self.info.sink + self.info.window

    def add(self, contestant: Contestant, software: dict[str, Any]) -> None:
        self.contestants.append(contestant)
        self.software[contestant.name] = software

    async def messages(self, tokens: int, seed: int) -> Callable[[], str]:
        """What the user says: texts of about so many tokens, the same for everybody."""
        tokenizer = await self.client.tokenizer
        messages = Messages(tokenizer.encode, tokens, seed)
        return lambda: tokenizer.decode(messages.encoded(messages.next_text()))


def run(bench: TurnsBench, progress: Progress, checkpoint: Checkpoint) -> Report:
    """Talk until the end, or until SIGINT or SIGTERM, and return the finished report.

    `progress` is told how far the run is, 0 to 1, and `checkpoint` gets partial reports now and then.
    Raises ConfigError when a server of ours cannot start, PeerFailed when a peer cannot, and RemoteError when
    somebody does not answer at all.
    """
    return asyncio.run(_run(bench, progress, checkpoint))


async def _run(bench: TurnsBench, progress: Progress, checkpoint: Checkpoint) -> Report:
    progress(0.0, "starting")
    async with opened_cast(bench) as cast:
        report = Report("turns", _settings(bench, cast.info), machine_facts())
        plan = TalkPlan(
            bench.message_tokens,
            bench.seed,
            Ends(turns=bench.turns),
            bench.checkpoint_every_s,
            {TRANSFORMERS: bench.transformers_turns},
        )
        results = await held_talk(
            cast,
            plan,
            progress,
            lambda talk: {"contestants": turns_results(talk.turns, cast.slab_tokens)},
            lambda partial: checkpoint(replace(report, results=partial)),
        )
    return replace(report, results=results, gates=turns_gates(results, bench.limit), finished_at=now())


@dataclass(frozen=True)
class TalkPlan:
    """What is said, until when, how often partial results are wanted, and who leaves early."""

    message_tokens: int
    seed: int
    ends: Ends
    checkpoint_every_s: float
    most_turns: dict[str, int] = field(default_factory=dict)


async def held_talk(
    cast: Cast,
    plan: TalkPlan,
    progress: Progress,
    conclude: Callable[[Talk], dict[str, Any]],
    checkpoint: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Let the cast talk to the end, or until a signal, and return the report's results.

    `conclude` makes the results of the turns so far; how it ended and who took part is added to them.
    """
    message = await cast.messages(plan.message_tokens, plan.seed)
    with interruptible() as interruption:
        talk = Talk(cast.contestants, interruption, plan.most_turns)
        await talk.warm_up()
        bystanders = Bystanders(cast.pids)

        def findings() -> dict[str, Any]:
            return {
                "ended_by": talk.ended_by,
                "abort_reason": interruption.reason,
                "bystanders_share": share_of(bystanders),
                "duration_s": talk.elapsed_s,
                "software": cast.software,
                **conclude(talk),
            }

        every = now_and_then(plan.checkpoint_every_s, lambda: checkpoint(findings()))
        await talk.hold(message, plan.ends, progress, every)
        return findings()


def now_and_then(seconds: float, do: Callable[[], object]) -> Callable[[], None]:
    """A call that does it when `seconds` have passed since the last time, or since now."""
    done = time.monotonic()

    def call() -> None:
        nonlocal done
        if time.monotonic() - done >= seconds:
            done = time.monotonic()
            do()

    return call


@asynccontextmanager
async def opened_cast(bench: TurnsBench) -> AsyncIterator[Cast]:
    """Everybody, ready to talk; all processes end with it."""
    config = replace(bench.config, capacity=CAPACITY)
    async with AsyncExitStack() as stack:
        flat = [way for way in bench.ways if way != UNMATCHED]
        servers = [(flat, ()), ([way for way in bench.ways if way == UNMATCHED], NO_MATCHING)]
        cast: Cast | None = None
        for ways, flags in servers:
            if ways:
                served = server_process(bench.model, config, flags, http=True)
                server, info = await stack.enter_async_context(served)
                if cast is None:
                    client = await stack.enter_async_context(AsyncClient(server.address))
                    cast = Cast(info, client)
                _seat_ours(cast, server, info, ways, flags, bench.max_tokens)
        assert cast is not None
        await _seat_peers(cast, stack, bench)
        yield cast


def _seat_ours(
    cast: Cast,
    server: ServerProcess,
    info: ServerInfo,
    ways: Sequence[str],
    flags: Sequence[str],
    tokens: int,
) -> None:
    assert server.http_address is not None
    cast.pids.append(server.pid)
    for way in ways:
        kind = ResponsesContestant if way == RESPONSES else ChatContestant
        contestant: Contestant = kind(way, server.http_address, info.model_id, tokens)
        cast.add(contestant, {"library": f"kakeya {info.version}", "flags": " ".join(flags) or "none"})


async def _seat_peers(cast: Cast, stack: AsyncExitStack, bench: TurnsBench) -> None:
    """Peers take a while to load, each in a process of its own."""
    path, threads = bench.model_path, bench.config.threads
    if bench.llama:
        llama = await asyncio.to_thread(LlamaServer, path, threads, bench.llama_server, bench.llama_context)
        stack.enter_context(llama)
        cast.pids += {llama.pid, llama.server_pid}
        cast.add(ChatContestant(LLAMA, llama.address, "any", bench.max_tokens), llama.facts)
    if bench.transformers_turns:
        other = await asyncio.to_thread(TransformersContestant, path, threads, bench.max_tokens)
        stack.enter_context(other)
        cast.pids.append(other.pid)
        cast.add(other, other.facts)


def _settings(bench: TurnsBench, info: ServerInfo) -> dict[str, Any]:
    settings = asdict(bench)
    del settings["model_path"]
    for name in ("model", "llama_server"):
        settings[name] = settings[name] and public_name(settings[name])
    return {**settings, **served_facts(info)}


def served_facts(info: ServerInfo) -> dict[str, Any]:
    """What a server of ours runs, and how it is asked to."""
    return {"sampling": "greedy", "server": {**asdict(info), "model_id": public_name(info.model_id)}}

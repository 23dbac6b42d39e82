"""`kakeya bench load`: chats arrive at random, ever more often: how many are answered in good time?

The same schedule is played on our server and on llama.cpp's, one after the other, rate by rate.
"""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kakeya.bench.arrivals import (
    QUIET_LIMIT,
    Arrival,
    Bounds,
    Mix,
    Side,
    Step,
    Texts,
    measured,
    schedule,
)
from kakeya.bench.benchmark import EngineBenchmark, Quick, Results, Run, numbers
from kakeya.bench.peers.llama_server import LlamaServer, require_llama_server
from kakeya.bench.processes import server_process
from kakeya.bench.report import Gate, at_least, at_most, busy, bystanders_gate
from kakeya.bench.stats import known
from kakeya.bench.tables import MS, Chart, Column, Series, Table, figures, listing
from kakeya.bench.usage import raise_descriptor_limit
from kakeya.config import DEFAULT_MODEL
from kakeya.errors import ConfigError, RemoteError
from kakeya.options import flags
from kakeya.types import BackendChoice

OURS, PEER = "kakeya", "llama.cpp"
# How many times the peer's goodput. The default model is small; other files are larger.
DEFAULT_MODEL_TARGET, FILE_TARGET = 3.0, 1.5
# A server keeps up with a rate while this share of its chats is good.
KEEPS_UP = 0.9
# How long the chats of the warm-up may take.
WARM_UP_S = 120.0
NO_PEER = "no peer in this run: use --peers"
NOT_MEASURED = "not measured in this run"
# What `--quick` says where the command line says nothing.
QUICK = {
    "rates": "1,2",
    "seconds": 3.0,
    "prompt_tokens": "16,32",
    "answer_tokens": "4,8",
    "system_tokens": 160,
}

_load = partial(typer.Option, rich_help_panel="The load")
_bound = partial(typer.Option, rich_help_panel="What is good")
_peers = partial(typer.Option, rich_help_panel="Peers")


class SystemPrompt(StrEnum):
    """Whether all chats begin with the same system prompt, or have none."""

    COMMON = "common"
    NONE = "none"
    BOTH = "both"

    @property
    def series(self) -> list[str]:
        return ["none", "common"] if self is SystemPrompt.BOTH else [self.value]


class Over(StrEnum):
    """How chats reach our server."""

    HTTP = "http"
    GRPC = "grpc"


@dataclass(frozen=True)
class Best:
    """A side's highest goodput, the rate where it was, and the highest rate with which the side kept up."""

    side: str
    system: str
    goodput: float
    rate: float
    kept_up_with: float | None


@dataclass(frozen=True)
class LoadResults(Results):
    """The steps, in the order in which they were played."""

    steps: list[Step] = field(default_factory=list)

    def curves(self) -> dict[tuple[str, str], list[Step]]:
        """The steps of each side and system prompt."""
        places = sorted({(step.system, step.side) for step in self.steps})
        return {
            (side, system): [step for step in self.steps if (step.side, step.system) == (side, system)]
            for system, side in places
        }

    @property
    def best(self) -> list[Best]:
        return [_best(steps) for steps in self.curves().values()]


def _best(steps: Sequence[Step]) -> Best:
    top = max(steps, key=lambda step: step.goodput)
    kept = [step.rate for step in steps if step.good_share >= KEEPS_UP]
    return Best(top.side, top.system, top.goodput, top.rate, max(kept, default=None))


@dataclass(frozen=True)
class Load(EngineBenchmark[LoadResults]):
    """Which chats arrive, how often, and when an answer is good."""

    kind = "load"
    title = "Load benchmark"
    help = "Chats that arrive at random, ever more often: how many are answered in good time?"
    results = LoadResults

    peers: Annotated[bool, _peers("--peers", help="Measure llama.cpp's server beside us, in turns.")] = False
    llama_server: Annotated[Path | None, _peers(help="A llama-server to run; else the one in xllamacpp.")] = (
        None
    )
    llama_slots: Annotated[int, _peers(help="Chats that it answers at once; 4 is its own default.")] = 4
    rates: Annotated[str, _load(help="Chats a second, rising, with commas.")] = "0.25,0.5,0.75,1,1.5,2,3,4"
    seconds: Annotated[float, _load(help="How long chats arrive at each rate.")] = 30.0
    prompt_tokens: Annotated[str, _load(help="Tokens of messages, each length equally often.")] = "32,128,320"
    answer_tokens: Annotated[str, _load(help="The most tokens of answers, likewise.")] = "16,64,128"
    system: Annotated[SystemPrompt, _load(help="Whether all chats begin with one system prompt.")] = (
        SystemPrompt.BOTH
    )
    system_tokens: Annotated[int, _load(help="Tokens of that system prompt.")] = 480
    capacity: Annotated[int, _load(help="Sessions of our server.")] = 32
    seed: Annotated[int, _load(help="Which chats, and when.")] = 0
    over: Annotated[Over, _load(help="How chats reach our server; `grpc` needs no HTTP server.")] = Over.HTTP
    quick: Quick = False
    first_token_s: Annotated[float, _bound(help="The latest moment of the first token.")] = 2.0
    gap_ms: Annotated[float, _bound(help="Between tokens, for 95 % of a chat's gaps.")] = 60.0

    def __post_init__(self) -> None:
        mix, rates = self.mix(), self.ramp()
        counts = (self.system_tokens, self.llama_slots, *mix.prompts, *mix.answers)
        if min(counts) < 1:
            raise ConfigError(f"numbers of tokens and of slots must be at least 1, got {min(counts)}")
        for name in ("seconds", "first_token_s", "gap_ms"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name.replace('_', '-')} must be above 0, got {getattr(self, name)}")
        if min(rates) <= 0 or list(rates) != sorted(set(rates)):
            raise ConfigError(f"rates must be rising numbers above 0, got {self.rates}")

    def presets(self) -> dict[str, Any]:
        return QUICK if self.quick else {}

    def check(self, *, picture: bool) -> None:
        if self.peers and self.backend is BackendChoice.CUDA:
            raise ConfigError("llama.cpp is measured on the CPU: leave out --peers or use --backend cpu")
        self.engine_config(capacity=self.capacity)

    def ramp(self) -> tuple[float, ...]:
        try:
            return tuple(float(part) for part in self.rates.split(","))
        except ValueError:
            raise ConfigError(
                f"rates must be numbers with commas, such as 0.5,1,2, got {self.rates!r}"
            ) from None

    def program(self) -> str | None:
        return None if self.llama_server is None else str(self.llama_server)

    def mix(self) -> Mix:
        return Mix(numbers("prompt-tokens", self.prompt_tokens), numbers("answer-tokens", self.answer_tokens))

    def bounds(self) -> Bounds:
        return Bounds(self.first_token_s, self.gap_ms / MS)

    def until_s(self) -> float:
        """When what is unfinished is given up: a last chat within its bounds may take this long."""
        return self.seconds + self.first_token_s + max(self.mix().answers) * self.gap_ms / MS

    def server_flags(self) -> list[str]:
        """Nobody is refused: who comes too often waits, and is late. Over gRPC the client waits."""
        if self.over is Over.GRPC:
            return []
        most = round(max(self.ramp()) * self.seconds) + 64
        return flags({"queue-depth": most, "queue-max-wait-s": 0, "max-connections": most})

    def run(self, run: Run[LoadResults]) -> LoadResults:
        """Play rate after rate, or until a signal. Raises the limit of open files."""
        if self.peers:
            require_llama_server(str(run.model_path), self.program(), without="leave out --peers")
        raise_descriptor_limit(round(max(self.ramp()) * self.seconds) + 512)
        return run.asynchronously(self._run(run))

    async def _run(self, run: Run[LoadResults]) -> LoadResults:
        async with AsyncExitStack() as stack:
            # llama.cpp computes on the CPU, and so do we beside it.
            engine = replace(self, backend=BackendChoice.CPU) if self.peers else self
            http = self.over is Over.HTTP
            serving = server_process(engine, self.capacity, self.server_flags(), http=http)
            server = await stack.enter_async_context(serving)
            assert server.pid is not None
            ours = Side(OURS, server.http_address, server.info.model_id, (server.pid,))
            sides = [ours if http else replace(ours, client=server.client, at_once=self.capacity)]
            run.facts |= {"sampling": "greedy", "server": server.facts}
            run.facts |= {"server_flags": " ".join(self.server_flags()), "until_s": self.until_s()}
            if self.peers:
                sides.append(await self._peer(run, stack))
            tokenizer = await server.client.tokenizer
            texts = Texts(tokenizer.encode, tokenizer.decode, self.seed)
            with run.watching([os.getpid(), *(pid for side in sides for pid in side.pids)]):
                return await _Playing(self, run, sides, texts).play()

    async def _peer(self, run: Run[LoadResults], stack: AsyncExitStack) -> Side:
        """llama.cpp's server, with room for a longest chat in every slot."""
        longest = self.system_tokens + max(self.mix().prompts) + max(self.mix().answers)
        context = self.llama_slots * (-(-longest // 256) + 1) * 256
        threads, slots = self.engine_config(capacity=1).threads, self.llama_slots
        start = partial(LlamaServer, str(run.model_path), threads, self.program(), context, slots)
        llama = stack.enter_context(await asyncio.to_thread(start))
        run.facts |= {"peer": {**llama.facts, "slots": slots}}
        return Side(PEER, llama.address, "any", tuple({llama.pid, llama.server_pid}))

    def gates(self, results: LoadResults) -> list[Gate]:
        """Goodput beside the peer's, on a quiet machine; no errors of ours; and the idle server is idle."""
        errors = [step.errors for step in results.steps if step.side == OURS]
        idle = max(known(step.idle_share for step in results.steps), default=None)
        no_idle = NOT_MEASURED if self.peers else NO_PEER
        return [
            *(self._goodput_gate(results, system) for system in self.system.series),
            at_most("our errors", float(sum(errors)) if errors else None, 0, absent=NOT_MEASURED),
            at_most("an idle server's share of one core", idle, QUIET_LIMIT, absent=no_idle),
            bystanders_gate(results.bystanders_share),
        ]

    def _goodput_gate(self, results: LoadResults, system: str) -> Gate:
        limit = DEFAULT_MODEL_TARGET if self.model == DEFAULT_MODEL else FILE_TARGET
        best = {each.side: each for each in results.best if each.system == system}
        value, absent = None, busy(results.bystanders_share) or ""
        if not self.peers:
            absent = NO_PEER
        elif len(best) < 2:
            absent = NOT_MEASURED
        elif not absent:
            value, absent = _times_peer(best[OURS], best[PEER], max(self.ramp()))
        name = f"goodput over {PEER}'s, system prompt: {system}"
        return at_least(name, value, limit, absent=absent)

    @staticmethod
    def show(results: LoadResults) -> list[Table | Chart]:
        steps = [step for curve in results.curves().values() for step in curve]
        shown: list[Table | Chart] = [
            Table("Best goodput", BEST_COLUMNS, results.best, labels=2),
            _chart("Goodput", "good/s", results, "goodput", picture=True),
            _chart("First token, p95", "s", results, "first_token_p95_s", log_y=True),
            _chart("Gap between tokens, p95", "ms", results, "gap_p95_s", MS, log_y=True),
            Table("Every rate", STEP_COLUMNS, steps, labels=2),
        ]
        failures = [
            (step.side, step.system, f"{step.rate:g}", str(count), failure)
            for step in steps
            for failure, count in step.failures.items()
        ]
        if failures:
            headings = ("side", "system prompt", "chats/s", "chats", "what became of them")
            shown.append(listing("Chats that did not end well", headings, failures))
        return shown


def _times_peer(ours: Best, theirs: Best, highest: float) -> tuple[float | None, str]:
    """How many times the peer's goodput ours is; or nothing, and why."""
    if ours.kept_up_with == theirs.kept_up_with == highest:
        return None, "both kept up with the highest rate: use higher --rates"
    if not theirs.goodput:
        return None, f"no chat of {PEER}'s was good: use lower --rates"
    return ours.goodput / theirs.goodput, ""


BEST_COLUMNS = [
    Column("side", "side"),
    Column("system prompt", "system"),
    Column("good chats/s", "goodput", form=".2f"),
    Column("at chats/s", "rate", form="g"),
    Column("kept up with", "kept_up_with", form="g"),
]
STEP_COLUMNS = [
    Column("side", "side"),
    Column("system prompt", "system"),
    Column("chats/s", "rate", form="g"),
    Column("sent", "sent"),
    Column("ended", "finished"),
    Column("good", "good_share", form=".0%"),
    Column("good chats/s", "goodput", form=".2f"),
    Column(
        "first token p50 / p95, ms",
        lambda step: figures(step.first_token_p50_s, step.first_token_p95_s, scale=MS),
    ),
    Column("gap p50 / p95, ms", lambda step: figures(step.gap_p50_s, step.gap_p95_s, scale=MS)),
    Column("tokens/s", "tokens_per_s"),
    Column("tokens each", "tokens_each", form=".1f"),
    Column("prompt cached", "cached_share", form=".0%"),
]


def _chart(title: str, unit: str, results: LoadResults, of: str, scale: float = 1, **how: Any) -> Chart:
    """A line over the rates for each side and system prompt."""
    curves, rates = results.curves(), sorted({step.rate for step in results.steps})
    several = len({system for _, system in curves}) > 1
    series = []
    for (side, system), steps in curves.items():
        found = {step.rate: getattr(step, of) for step in steps}
        values = [None if found.get(rate) is None else found[rate] * scale for rate in rates]
        series.append(Series(f"{side}, {system}" if several else side, values))
    x_title = f"{title}, over chats a second" + ("; system prompt: common or none" if several else "")
    return Chart(title, unit, x_title, rates, series, **how)


@dataclass
class _Playing:
    """The same chats to every side, rate after rate; each rate begins with another side."""

    bench: Load
    run: Run[LoadResults]
    sides: list[Side]
    texts: Texts
    results: LoadResults = field(default_factory=LoadResults)

    async def play(self) -> LoadResults:
        bench, ask = self.bench, self.run.interruption.unless_asked
        work = self.run.work(len(bench.ramp()) * len(bench.system.series) * len(self.sides) + 1)
        work.piece("warming up")
        await ask(self._warm_up())
        common = replace(bench.mix(), system=self.texts.next_text(bench.system_tokens))
        for rate in bench.ramp():
            for system in bench.system.series:
                mix = common if system == SystemPrompt.COMMON else bench.mix()
                arrivals = schedule(mix, rate, bench.seconds, self.texts, bench.seed)
                for side in self.sides:
                    work.piece(f"{side.name}, {rate:g} chats/s, system prompt: {system}")
                    step = await ask(self._step(side, system, rate, arrivals))
                    if step is None:
                        return self.results
                    self.results = LoadResults([*self.results.steps, step])
                    self.run.checkpoint(self.results)
            self.sides.append(self.sides.pop(0))
        return self.results

    async def _warm_up(self) -> None:
        """A few chats with everybody, uncounted. Raises RemoteError when one of the servers answers none."""
        arrivals = schedule(self.bench.mix(), 4.0, 1.0, self.texts, self.bench.seed)
        for side in self.sides:
            outcomes = await side.play(arrivals, WARM_UP_S)
            if all(outcome.failure for outcome in outcomes):
                raise RemoteError(f"{side.name} answered no chat: {outcomes[0].failure}")

    async def _step(self, side: Side, system: str, rate: float, arrivals: Sequence[Arrival]) -> Step:
        for each in self.sides:
            await each.settle()
        idle = [each for each in self.sides if each is not side]
        busy_s, began = sum(each.cpu_s() for each in idle), time.perf_counter()
        outcomes = await side.play(arrivals, self.bench.until_s())
        wall = time.perf_counter() - began
        share = (sum(each.cpu_s() for each in idle) - busy_s) / wall if idle else None
        came_of_it = measured(outcomes, self.bench.bounds())
        return Step(side.name, system, rate, self.bench.seconds, wall, share, **came_of_it)

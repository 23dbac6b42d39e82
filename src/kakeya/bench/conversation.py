"""`kakeya bench conversation`: one conversation in one or more ways: does every turn cost the same?

Every message goes to all ways before the next one. A turn that fails is recorded, and the run goes on.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from kakeya.bench.benchmark import EngineBenchmark, Run
from kakeya.bench.peers.llama_server import LlamaServer, require_llama_server
from kakeya.bench.peers.transformers import TransformersWay, require_transformers
from kakeya.bench.processes import resident_bytes, server_facts, server_process
from kakeya.bench.report import Gate, at_most, busy, bystanders_gate
from kakeya.bench.tables import MIB, MS, Chart, Column, Table, figure, figures, listing, over
from kakeya.bench.talk import (
    CHAT,
    ENDS,
    GRPC,
    HEAD,
    LLAMA,
    PLATEAU_TURNS_NEEDED,
    RESPONSES,
    RSS_TAIL,
    SETTLED_TURN,
    TRANSFORMERS,
    TURNS_NEEDED,
    UNMATCHED,
    ConversationResults,
    Talk,
    Turn,
    values,
)  # fmt: skip
from kakeya.bench.text import Messages
from kakeya.bench.ways import TIMEOUT_S, ChatWay, GrpcWay, Refused, ResponsesWay, Way
from kakeya.client import AsyncClient, ServerInfo
from kakeya.errors import ConfigError, KakeyaError

OURS = (GRPC, RESPONSES, CHAT, UNMATCHED)
WAYS = (*OURS, LLAMA, TRANSFORMERS)
# Whose turns must cost the same however long the history, and which of them send text.
FLAT = (GRPC, RESPONSES, CHAT)
FLAT_TEXT = (RESPONSES, CHAT)

DEFAULT_DURATION_S = 1800.0
# Sessions of a server with HTTP: conversations, and the branch points that the Responses API leaves behind.
HTTP_CAPACITY = 8
WARM_UP = "Hello."
# After an error the server gets a moment.
PAUSE_AFTER_ERROR_S = 1.0

COMPUTED_LIMIT = 1.10

_server = partial(typer.Option, rich_help_panel="A server that runs already")
_talk = partial(typer.Option, rich_help_panel="The conversation")
_peers = partial(typer.Option, rich_help_panel="Peers")
_gate = partial(typer.Option, rich_help_panel="Gates")


@dataclass(frozen=True)
class Conversation(EngineBenchmark[ConversationResults]):
    """What to say, in which ways, until when. Whichever end comes first ends the run."""

    kind = "conversation"
    title = "One conversation, turn by turn"
    help = "One conversation in several ways: does every turn cost the same?"
    results = ConversationResults
    secrets = frozenset({"api_key", "server_pid"})

    ways: Annotated[str, _talk(help=f"How it is held, with commas: {', '.join(WAYS)}.")] = GRPC
    duration_s: Annotated[float | None, _talk(help="End after so long; 1800 when no other end is given.")] = (
        None
    )
    turns: Annotated[int | None, _talk(help="End after so many.")] = None
    target_history_tokens: Annotated[int | None, _talk(help="End when the history is so long.")] = None
    turn_spacing_s: Annotated[float, _talk(help="Between starts of turns; an overrun starts at once.")] = 0.0
    max_tokens: Annotated[int, _talk(help="The most tokens of each answer.")] = 64
    message_tokens: Annotated[int, _talk(help="Tokens of each message.")] = 64
    seed: Annotated[int, _talk(help="Which messages.")] = 0
    grpc_address: Annotated[str | None, _server(help="HOST:PORT, for the way grpc alone.")] = None
    api_key: Annotated[str | None, _server(help="Its key.")] = None
    server_pid: Annotated[int | None, _server(help="Its process, to watch its memory.")] = None
    llama_server: Annotated[Path | None, _peers(help="A llama-server to run; else the one in xllamacpp.")] = (
        None
    )
    llama_context: Annotated[int, _peers(help="Its context in tokens; 0: as the model was trained for.")] = 0
    transformers_turns: Annotated[int, _peers(help="For how many turns transformers takes part.")] = 20
    kv_limit: Annotated[float, _gate(help="How far KV memory may vary past the plateau.")] = 0.10
    tail_limit: Annotated[float, _gate(help="The last turns' latency over the first ones'.")] = 1.05
    flat_limit: Annotated[
        float, _gate(help="The last turns' latency over that when the window was just full.")
    ] = 1.05
    rss_limit: Annotated[float, _gate(help="The server's memory: last 20 turns over turn 20.")] = 1.01
    partial_checkpoint_every_s: Annotated[
        float, typer.Option(help="Write what there is so often, in seconds, marked as partial.")
    ] = 600.0

    def __post_init__(self) -> None:
        for name in ("duration_s", "turns", "target_history_tokens", "partial_checkpoint_every_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name.replace('_', '-')} must be above 0, got {value}")
        for name, least in (("max_tokens", 1), ("message_tokens", 1), ("transformers_turns", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name.replace('_', '-')} must be at least 1, got {getattr(self, name)}")
        for name in ("turn_spacing_s", "llama_context"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name.replace('_', '-')} must not be negative, got {getattr(self, name)}")
        self._check_ways()

    def _check_ways(self) -> None:
        names = self.names()
        unknown = [name for name in names if name not in WAYS]
        if unknown or len(set(names)) != len(names):
            raise ConfigError(f"ways must be some of {', '.join(WAYS)}, each once, got {self.ways!r}")
        if not set(names) & set(OURS):
            raise ConfigError("one of our own ways must take part")
        if self.grpc_address is not None and names != [GRPC]:
            raise ConfigError(f"grpc-address is for the way grpc alone, got ways {self.ways!r}")

    @property
    def model_to_fetch(self) -> str | None:
        return self.model if self.grpc_address is None else None

    @property
    def checkpoint_every_s(self) -> float:
        return self.partial_checkpoint_every_s

    def check(self, *, picture: bool) -> None:
        super().check(picture=picture)
        if self.server_pid is not None and resident_bytes(self.server_pid) is None:
            raise ConfigError(f"server-pid must be a running process, got {self.server_pid}")

    def names(self) -> list[str]:
        return [name.strip() for name in self.ways.split(",")]

    def ends(self) -> dict[str, float]:
        """Each of them ends the run."""
        names = {"duration": "duration_s", "turns": "turns", "target history": "target_history_tokens"}
        given = {name: getattr(self, of) for name, of in names.items() if getattr(self, of) is not None}
        return given or {"duration": DEFAULT_DURATION_S}

    def program(self) -> str | None:
        return None if self.llama_server is None else str(self.llama_server)

    def run(self, run: Run[ConversationResults]) -> ConversationResults:
        """Talk until the end, or until a signal."""
        if LLAMA in self.names():
            require_llama_server(str(run.model_path), self.program())
        if TRANSFORMERS in self.names():
            require_transformers(str(run.model_path))
        return run.asynchronously(self._run(run))

    async def _run(self, run: Run[ConversationResults]) -> ConversationResults:
        async with AsyncExitStack() as stack:
            cast = _Cast(self, run, stack)
            conversing = Conversing(self, run, *await cast.seats())
            await conversing.warm_up()
            known = [pid for pid in cast.pids if pid is not None]
            if len(known) < len(cast.pids):  # a server whose process is not known would count as a bystander
                return await conversing.hold()
            with run.watching(known):
                return await conversing.hold()

    def gates(self, results: ConversationResults) -> list[Gate]:
        """Ours compute only what is new, stay flat, keep their memory, and never fail."""
        ways, share = results.by_name(), results.bystanders_share
        gates = [self._kv_gate(ways[GRPC]), self._rss_gate(ways[GRPC])] if GRPC in ways else []
        gates += [self._prefill_gate(ways[name], share) for name in FLAT if name in ways]
        for name in FLAT_TEXT:
            if name in ways:
                gates += self._flat_gates(ways[name], share)
        gates += [_error_gate(ways[name]) for name in OURS if name in ways]
        # Of several ways a busy machine slows one more than another.
        return [*gates, bystanders_gate(share)] if len(ways) > 1 else gates

    def _kv_gate(self, talk: Talk) -> Gate:
        name, past = f"{talk.way}: kv_bounded", talk.past_plateau()
        kept = values(past or talk.turns, "kv_live_bytes")
        if kept and not any(kept):
            zeros = "kv_live_bytes is 0 in every turn: nothing was held, or nothing was measured"
            return Gate(name, 0.0, "at most", self.kv_limit, False, zeros)
        absent = "the window never filled" if talk.n_turns else "no turn went well"
        if past:
            absent = f"the window was full in fewer than {PLATEAU_TURNS_NEEDED} turns"
        return at_most(name, talk.kv_spread_after_plateau, self.kv_limit, absent=absent)

    def _rss_gate(self, talk: Talk) -> Gate:
        unseen = f"the server's memory was not seen in more than {SETTLED_TURN} turns"
        tail = talk.server_rss.tail_over_settled
        return at_most(f"{talk.way}: rss_bounded", tail, self.rss_limit, absent=unseen)

    def _prefill_gate(self, talk: Talk, share: float | None) -> Gate:
        """What the last 50 turns may take of the first ones, unless the machine is known to be busy."""
        noise, few = busy(share), f"{talk.n_turns} turns went well; {TURNS_NEEDED} are needed"
        value = None if noise else talk.whole_latency.last_over_first
        return at_most(f"{talk.way}: prefill_bounded", value, self.tail_limit, absent=noise or few)

    def _flat_gates(self, talk: Talk, share: float | None) -> list[Gate]:
        few = f"{talk.n_turns} turns went well; {TURNS_NEEDED} are needed"
        noise = busy(share, "latencies")
        short = f"fewer than {TURNS_NEEDED} turns began with more history than the window"
        flat = None if noise else talk.latency_once_full.last_over_first
        computed = f"{talk.way}: prompt tokens computed, last over first"
        latency = f"{talk.way}: latency once the window is full, last over first"
        return [
            at_most(computed, talk.computed_tokens.last_over_first, COMPUTED_LIMIT, absent=few),
            at_most(latency, flat, self.flat_limit, absent=noise or short),
        ]

    @staticmethod
    def show(results: ConversationResults) -> list[Table | Chart]:
        times_ours = results.times_ours
        columns = [*ENDS_COLUMNS, Column("× ours", lambda talk: times_ours.get(talk.way), form=".2f"), ENDED]
        buckets = [(talk.way, bucket) for talk in results.ways for bucket in talk.buckets_10min]
        software = [(talk.way, _told(talk.software)) for talk in results.ways]
        errors = [(talk.way, turn) for talk in results.ways for turn in talk.turns if not turn.ok][:20]
        return [
            Table(f"Latency, medians of the first and last {ENDS} turns", columns, results.ways),
            *_charts(results),
            Table("The whole conversation", WHOLE_COLUMNS, results.ways),
            listing("The run", ("what", "value"), _run_rows(results), labels=1),
            Table("By 10 minutes", BUCKET_COLUMNS, buckets),
            listing("Who took part", ("way", "what"), software),
            *([Table("The first errors", ERROR_COLUMNS, errors, labels=4)] if errors else ()),
        ]


def _error_gate(talk: Talk) -> Gate:
    value = float(talk.n_errors) if talk.turns else None
    return at_most(f"{talk.way}: errors", value, 0, absent="there was no turn")


def _ended(talk: Talk) -> str:
    if talk.stopped_at:
        return f"stopped at turn {talk.stopped_at}"
    return f"{talk.n_errors} errors" if talk.n_errors else "well"


def _ms(*seconds: float | None) -> str:
    return figures(*seconds, scale=MS, form=",.1f")


def _percentiles(talk: Talk, name: str) -> str:
    return _ms(*(talk.percentiles[f"{name}_p{percent}_s"] for percent in (50, 95)))


def _memory(talk: Talk) -> str:
    rss = talk.server_rss
    return figures(rss.peak_over_settled, rss.tail_over_settled, rss.last_over_settled, form=".4f")


def _bucket(title: str, of: str, scale: float = 1, form: str = ",.0f") -> Column:
    return Column(title, lambda row: row[1][of], scale, form)


ENDS_COLUMNS = [
    Column("way", "way"),
    Column("turns", "n_turns"),
    Column("first, ms", "latency.first", MS),
    Column("last, ms", "latency.last", MS),
    Column("last/first", "latency.last_over_first", form=".2f"),
    Column("first token, ms", "ttft.last", MS),
    Column("computed, first", "computed_tokens.first"),
    Column("last", "computed_tokens.last"),
    Column("history", "history_tokens"),
    Column("answer", "mean_answer_tokens", form=".1f"),
]
ENDED = Column("ended", _ended)
WHOLE_COLUMNS = [
    Column("way", "way"),
    Column("latency p50 / p95, ms", lambda talk: _percentiles(talk, "latency")),
    Column("first token p50 / p95, ms", lambda talk: _percentiles(talk, "ttft")),
    Column(f"first {HEAD}, ms", "whole_latency.first", MS, ",.1f"),
    Column(f"last {HEAD}, ms", "whole_latency.last", MS, ",.1f"),
    Column("last over first", "whole_latency.last_over_first", form=".3f"),
    Column("least KV MiB", lambda talk: talk.kv_live_bytes["min"], MIB, ",.2f"),
    Column("most", lambda talk: talk.kv_live_bytes["max"], MIB, ",.2f"),
    Column(f"memory over turn {SETTLED_TURN}'s: peak / last {RSS_TAIL} turns / last turn", _memory),
    Column("its slope, KiB a minute", "server_rss.slope_bytes_per_s", 60 / 1024, "+,.1f"),
]
BUCKET_COLUMNS = [
    Column("way", lambda row: row[0]),
    _bucket("from minute", "from_s", 1 / 60),
    _bucket("turns", "n_turns"),
    _bucket("errors", "n_errors"),
    _bucket("latency p50, ms", "latency_p50_s", MS, ",.1f"),
    _bucket("p95, ms", "latency_p95_s", MS, ",.1f"),
    _bucket("KV MiB", "kv_live_bytes_max", MIB, ",.2f"),
    _bucket("history", "history_tokens_max"),
    _bucket("RSS MiB", "server_rss_bytes_max", MIB, ",.1f"),
]
ERROR_COLUMNS = [
    Column("way", lambda row: row[0]),
    Column("turn", lambda row: row[1].turn),
    Column("second", lambda row: row[1].t_relative_s, form=",.1f"),
    Column("message", lambda row: f"{row[1].error_class}: {row[1].error_str}"),
]


def _run_rows(results: ConversationResults) -> list[tuple[str, str]]:
    aborted = results.abort_reason and f"aborted: {results.abort_reason}"
    matching = results.unmatched_over_matched.items()
    opened = [figure(talk.sessions_opened) for talk in results.ways if talk.sessions_opened is not None]
    return [
        ("ended by", results.ended_by or aborted or "not yet"),
        ("seconds", figure(results.duration_s, form=",.1f")),
        ("share of the machine that others used", figure(results.bystanders_share, form=".1%")),
        *((f"unmatched over matched, {name}", figure(value, form=".2f")) for name, value in matching),
        *(("sessions opened", count) for count in opened),
    ]


def _told(software: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in software.items())


def _charts(results: ConversationResults) -> list[Chart]:
    """Over turns all ways beside each other; a session over gRPC, which may be long, over its history."""
    ways = results.by_name()
    count = max((len(talk.turns) for talk in results.ways), default=0)
    turns = {name: {turn.turn: turn for turn in talk.good()} for name, talk in ways.items()}

    def over_turns(title: str, unit: str, of: str, **how: Any) -> Chart:
        series = {
            name: lambda number, found=found: getattr(found.get(number, Turn()), of)
            for name, found in turns.items()
        }
        numbers = range(1, count + 1)
        return over(title, unit, "turn", [float(each) for each in numbers], numbers, series, **how)

    alone = list(ways) == [GRPC]
    stops = {talk.way: _ended(talk) for talk in results.ways if talk.stopped_at}
    return [
        over_turns("Latency per turn", "seconds", "latency_s", log_y=True, ends=stops, picture=not alone),
        over_turns("Prompt tokens computed per turn", "tokens", "computed_tokens"),
        *(_history_charts(ways[GRPC].good(), picture=alone) if GRPC in ways else ()),
    ]


def _history_charts(turns: Sequence[Turn], *, picture: bool) -> list[Chart]:
    axis = "thousand tokens of history"
    at = [(turn.history_tokens or 0) / 1000 for turn in turns]
    latency = {"latency": "latency_s", "first token": "ttft_s"}
    kept, memory = {"live KV bytes": "kv_live_bytes"}, {"server resident memory": "server_rss_bytes"}
    return [
        over("Latency over history", "ms", axis, at, turns, latency, MS, picture=picture),
        over("KV memory", "MiB", axis, at, turns, kept, MIB),
        over("Server memory", "MiB", axis, at, turns, memory, MIB),
    ]


@dataclass
class Seat:
    """A way and its turns so far; it leaves after `most_turns`, or when it cannot go on."""

    way: Way
    window_tokens: int
    software: dict[str, Any]
    server_pid: int | None = None
    most_turns: int | None = None
    turns: list[Turn] = field(default_factory=list)

    @property
    def has_left(self) -> bool:
        return bool(self.turns) and (len(self.turns) == self.most_turns or self.turns[-1].stopped)

    @property
    def history(self) -> int:
        return next((turn.history_tokens or 0 for turn in reversed(self.turns) if turn.ok), 0)

    def talk(self) -> Talk:
        opened = self.way.sessions_opened if isinstance(self.way, GrpcWay) else None
        return Talk(self.way.name, list(self.turns), self.window_tokens, self.software, opened)


@dataclass
class Conversing:
    """The conversation: everybody's turns, one after the other."""

    bench: Conversation
    run: Run[ConversationResults]
    seats: Sequence[Seat]
    next_text: Callable[[], str]
    began: float = field(default_factory=time.perf_counter)
    ended_by: str | None = None

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.began

    def results(self) -> ConversationResults:
        return ConversationResults([seat.talk() for seat in self.seats], self.elapsed_s, self.ended_by)

    async def warm_up(self) -> None:
        """A short conversation with everybody, uncounted. Raises what a way raises."""
        for seat in self.seats:
            await self.run.interruption.unless_asked(seat.way.say(WARM_UP))
            await seat.way.forget()
        self.began = time.perf_counter()

    async def hold(self) -> ConversationResults:
        """Turn after turn until an end is reached, nobody is left or somebody asks for the end."""
        number = 1
        while not self._is_over(number) and await self._round(number):
            number += 1
        results = self.results()
        for seat in self.seats:
            await seat.way.forget()
        return results

    async def _round(self, number: int) -> bool:
        """One turn of everybody, then a partial report and a pause; False when the end was asked for."""
        text, started, pause = self.next_text(), self.elapsed_s, self.bench.turn_spacing_s
        for seat in self._order(number):
            turn = await self.run.interruption.unless_asked(self._turn(seat, number, text))
            if turn is None:
                return False
            seat.turns.append(turn)
            if not turn.ok and not turn.stopped:
                pause = max(pause, PAUSE_AFTER_ERROR_S)
        self.run.checkpoint(self.results())
        await self.run.interruption.sleep(started + pause - self.elapsed_s)
        return True

    def _is_over(self, number: int) -> bool:
        history = max(seat.history for seat in self.seats)
        reached = {"duration": self.elapsed_s, "turns": number - 1, "target history": history}
        done = {name: reached[name] / end for name, end in self.bench.ends().items()}
        nearest = max(done, key=lambda name: done[name])
        self.run.progress(min(1.0, done[nearest]), f"turn {number:,}, {history:,} tokens")
        if done[nearest] >= 1.0:
            self.ended_by = nearest
        elif all(seat.has_left for seat in self.seats):
            self.ended_by = "nobody left"
        return self.ended_by is not None or self.run.interruption.reason is not None

    def _order(self, number: int) -> list[Seat]:
        """Those still here; each turn begins with another one, so that nobody always comes first."""
        here = [seat for seat in self.seats if not seat.has_left]
        first = number % len(here)
        return [*here[first:], *here[:first]]

    async def _turn(self, seat: Seat, number: int, text: str) -> Turn:
        began = self.elapsed_s
        try:
            turn = await seat.way.say(text)
        except KakeyaError as error:
            stopped = isinstance(error, Refused)
            return Turn(
                number, began, error_class=type(error).__name__, error_str=str(error), stopped=stopped
            )
        rss = None if seat.server_pid is None else resident_bytes(seat.server_pid)
        return replace(turn, turn=number, t_relative_s=began, server_rss_bytes=rss)


@dataclass(frozen=True)
class _Server:
    """One of ours; its process is not known where it ran before us."""

    client: AsyncClient
    info: ServerInfo
    pid: int | None
    http_address: str = ""
    flags: str = "none"


class _Cast:
    """Opens everybody who takes part; the stack ends them. `pids` has None for an unknown process."""

    def __init__(self, bench: Conversation, run: Run[ConversationResults], stack: AsyncExitStack) -> None:
        self._bench, self._run, self._stack = bench, run, stack
        self._servers: dict[str, _Server] = {}
        self.pids: list[int | None] = [os.getpid()]

    async def seats(self) -> tuple[list[Seat], Callable[[], str]]:
        """Everybody ready to talk, and what is said: texts of about so many tokens, the same for all."""
        bench, names = self._bench, self._bench.names()
        http = await self._stack.enter_async_context(httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False))
        await self._open([name for name in names if name in FLAT])
        await self._open([name for name in names if name == UNMATCHED], "--no-chat-matching")
        first = next(iter(self._servers.values()))
        self._run.facts |= {"sampling": "greedy", "server": server_facts(first.info)}
        tokenizer = await first.client.tokenizer
        messages = Messages(tokenizer.encode, bench.message_tokens, bench.seed)
        ways = [await self._seat(name, http, messages, first.info) for name in names]
        return ways, lambda: tokenizer.decode(messages.encoded(messages.next_text()))

    async def _open(self, names: Sequence[str], *flags: str) -> None:
        """The server that these ways share, or the one that runs already."""
        bench, http = self._bench, list(names) != [GRPC]
        if not names:
            return
        if bench.grpc_address is not None:
            client = AsyncClient(bench.grpc_address, api_key=bench.api_key)
            await self._stack.enter_async_context(client)
            server = _Server(client, await client.server_info(), bench.server_pid)
        else:
            served = server_process(bench, HTTP_CAPACITY if http else 1, flags, http=http)
            process, info = await self._stack.enter_async_context(served)
            client = await self._stack.enter_async_context(AsyncClient(process.address))
            address, told = process.http_address or "", " ".join(flags) or "none"
            server = _Server(client, info, process.pid, address, told)
        self.pids.append(server.pid)
        self._servers |= dict.fromkeys(names, server)

    async def _seat(self, name: str, http: httpx.AsyncClient, messages: Messages, info: ServerInfo) -> Seat:
        bench, window = self._bench, info.sink + info.window
        path, threads = str(self._run.model_path), bench.engine_config(capacity=1).threads
        if name == LLAMA:
            # Peers take a while to load.
            llama = await asyncio.to_thread(LlamaServer, path, threads, bench.program(), bench.llama_context)
            self._stack.enter_context(llama)
            self.pids += {llama.pid, llama.server_pid}
            way: Way = ChatWay(LLAMA, http, llama.address, "any", bench.max_tokens)
            return Seat(way, window, llama.facts, llama.server_pid)
        if name == TRANSFORMERS:
            peer = await asyncio.to_thread(TransformersWay, path, threads, bench.max_tokens)
            self._stack.enter_context(peer)
            self.pids.append(peer.pid)
            return Seat(peer, window, peer.facts, peer.pid, bench.transformers_turns)
        server = self._servers[name]
        software = {"library": f"kakeya {info.version}", "flags": server.flags}
        if name == GRPC:
            way = GrpcWay(server.client, messages, bench.max_tokens)
        else:
            kind = ResponsesWay if name == RESPONSES else ChatWay
            way = kind(name, http, server.http_address, info.model_id, bench.max_tokens)
        return Seat(way, window, software, server.pid)

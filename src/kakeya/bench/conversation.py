"""`kakeya bench conversation`: one conversation in one or more ways: does every turn cost the same?

Every message goes to all ways before the next one. A turn that fails is recorded, and the run goes on.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
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
from kakeya.bench.processes import Server, running_server, server_process
from kakeya.bench.report import Gate, at_most, busy, bystanders_gate
from kakeya.bench.talk import (
    CHAT,
    GRPC,
    LLAMA,
    PLATEAU_TURNS_NEEDED,
    RESPONSES,
    SETTLED_TURN,
    TRANSFORMERS,
    TURNS_NEEDED,
    UNMATCHED,
    ConversationResults,
    Talk,
    Turn,
    shown,
    values,
)  # fmt: skip
from kakeya.bench.text import Messages
from kakeya.bench.usage import resident_bytes
from kakeya.bench.ways import TIMEOUT_S, ChatWay, GrpcWay, Refused, ResponsesWay, Way
from kakeya.errors import ConfigError, KakeyaError
from kakeya.options import SECRETS

OURS = (GRPC, RESPONSES, CHAT, UNMATCHED)
WAYS = (*OURS, LLAMA, TRANSFORMERS)
# Whose turns must cost the same however long the history, and which of them send text.
FLAT = (GRPC, RESPONSES, CHAT)
FLAT_TEXT = (RESPONSES, CHAT)

# Which ways share a server, and its flags.
SERVERS: dict[tuple[str, ...], tuple[str, ...]] = {FLAT: (), (UNMATCHED,): ("--no-chat-matching",)}
# Sessions of a server with HTTP: conversations, and the branch points that the Responses API leaves behind.
HTTP_CAPACITY = 8
WARM_UP = "Hello."
# After an error the server gets a moment.
PAUSE_AFTER_ERROR_S = 1.0
DEFAULT_DURATION_S = 1800.0
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
    secrets = SECRETS | {"server_pid"}

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
        self.require_least(max_tokens=1, message_tokens=1, transformers_turns=1)
        self.require_least(turn_spacing_s=0, llama_context=0)
        self._check_ways()

    def _check_ways(self) -> None:
        names = self.names()
        if not set(names) <= set(WAYS) or len(set(names)) != len(names):
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
            cast = Cast(self, run, stack)
            conversing = await cast.conversing()
            await conversing.warm_up()
            with run.watching(list(cast.pids)):
                return await conversing.hold()

    def gates(self, results: ConversationResults) -> list[Gate]:
        """Ours compute only what is new, stay flat, keep their memory, and never fail."""
        share = results.bystanders_share
        gates = [gate for talk in results.ways for gate in self._gates(talk, share)]
        # Of several ways a busy machine slows one more than another.
        return [*gates, bystanders_gate(share)] if len(results.ways) > 1 else gates

    def _gates(self, talk: Talk, share: float | None) -> Iterator[Gate]:
        few = f"{talk.n_turns} turns went well; {TURNS_NEEDED} are needed"
        if talk.way == GRPC:
            yield self._kv_gate(talk)
            tail = talk.server_rss.tail_over_settled
            unseen = f"the server's memory was not seen in more than {SETTLED_TURN} turns"
            yield at_most(f"{talk.way}: rss_bounded", tail, self.rss_limit, absent=unseen)
        if talk.way in FLAT:
            noise = busy(share)
            value = None if noise else talk.whole_latency.last_over_first
            yield at_most(f"{talk.way}: prefill_bounded", value, self.tail_limit, absent=noise or few)
        if talk.way in FLAT_TEXT:
            computed = talk.computed_tokens.last_over_first
            name = f"{talk.way}: prompt tokens computed, last over first"
            yield at_most(name, computed, COMPUTED_LIMIT, absent=few)
            noise = busy(share, "latencies")
            value = None if noise else talk.latency_once_full.last_over_first
            short = f"fewer than {TURNS_NEEDED} turns began with more history than the window"
            name = f"{talk.way}: latency once the window is full, last over first"
            yield at_most(name, value, self.flat_limit, absent=noise or short)
        if talk.way in OURS:
            errors = float(talk.n_errors) if talk.turns else None
            yield at_most(f"{talk.way}: errors", errors, 0, absent="there was no turn")

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

    show = staticmethod(shown)


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

    async def take_turn(self, number: int, began: float, text: str) -> Turn:
        try:
            turn = await self.way.say(text)
        except KakeyaError as error:
            name, stopped = type(error).__name__, isinstance(error, Refused)
            return Turn(number, began, error_class=name, error_str=str(error), stopped=stopped)
        rss = None if self.server_pid is None else resident_bytes(self.server_pid)
        return replace(turn, turn=number, t_relative_s=began, server_rss_bytes=rss)


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

    async def _round(self, number: int) -> bool:
        """One turn of everybody, then a partial report and a pause; False when the end was asked for."""
        text, started, pause = self.next_text(), self.elapsed_s, self.bench.turn_spacing_s
        here = [seat for seat in self.seats if not seat.has_left]
        first = number % len(here)  # each turn begins with another one, so that nobody always comes first
        for seat in (*here[first:], *here[:first]):
            turn = await self.run.interruption.unless_asked(seat.take_turn(number, self.elapsed_s, text))
            if turn is None:
                return False
            seat.turns.append(turn)
            if not turn.ok and not turn.stopped:
                pause = max(pause, PAUSE_AFTER_ERROR_S)
        self.run.checkpoint(self.results())
        await self.run.interruption.sleep(started + pause - self.elapsed_s)
        return True


class Cast:
    """Opens everybody who takes part; the stack ends them. `pids` has None for an unknown process."""

    def __init__(self, bench: Conversation, run: Run[ConversationResults], stack: AsyncExitStack) -> None:
        self._bench, self._run, self._stack = bench, run, stack
        self._http = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
        self.pids: set[int | None] = {os.getpid()}

    async def conversing(self) -> Conversing:
        """Everybody ready to talk, and what is said: texts of about so many tokens, the same for all."""
        bench, servers = self._bench, await self._servers()
        await self._stack.enter_async_context(self._http)
        first = next(iter(servers.values()))
        self._run.facts |= {"sampling": "greedy", "server": first.facts}
        tokenizer = await first.client.tokenizer
        messages = Messages(tokenizer.encode, bench.message_tokens, bench.seed)
        window = first.info.sink + first.info.window
        seats = [
            self._ours(name, servers[name], messages, window)
            if name in servers
            else await self._peer(name, window)
            for name in bench.names()
        ]
        return Conversing(
            bench, self._run, seats, lambda: tokenizer.decode(messages.encoded(messages.next_text()))
        )

    async def _servers(self) -> dict[str, Server]:
        """For each of our ways a server of ours, or the one that runs already."""
        bench, servers = self._bench, dict[str, Server]()
        for group, flags in SERVERS.items():
            names = [name for name in bench.names() if name in group]
            if not names:
                continue
            if bench.grpc_address is not None:
                opening = running_server(bench.grpc_address, pid=bench.server_pid, api_key=bench.api_key)
            else:
                http = names != [GRPC]
                opening = server_process(bench, HTTP_CAPACITY if http else 1, flags, http=http)
            server = await self._stack.enter_async_context(opening)
            self.pids.add(server.pid)
            servers |= dict.fromkeys(names, server)
        return servers

    def _ours(self, name: str, server: Server, messages: Messages, window: int) -> Seat:
        most, model = self._bench.max_tokens, server.info.model_id
        flags = " ".join(SERVERS[UNMATCHED,]) if name == UNMATCHED else "none"
        software = {"library": f"kakeya {server.info.version}", "flags": flags}
        if name == GRPC:
            way: Way = GrpcWay(server.client, messages, most)
        else:
            kind = ResponsesWay if name == RESPONSES else ChatWay
            way = kind(name, self._http, server.http_address, model, most)
        return Seat(way, window, software, server.pid)

    async def _peer(self, name: str, window: int) -> Seat:
        """Peers take a while to load, so a thread waits for them."""
        bench, path = self._bench, str(self._run.model_path)
        threads = bench.engine_config(capacity=1).threads
        if name == LLAMA:
            llama = await asyncio.to_thread(LlamaServer, path, threads, bench.program(), bench.llama_context)
            self._stack.enter_context(llama)
            self.pids |= {llama.pid, llama.server_pid}
            way = ChatWay(LLAMA, self._http, llama.address, "any", bench.max_tokens)
            return Seat(way, window, llama.facts, llama.server_pid)
        peer = await asyncio.to_thread(TransformersWay, path, threads, bench.max_tokens)
        self._stack.enter_context(peer)
        self.pids.add(peer.pid)
        return Seat(peer, window, peer.facts, peer.pid, bench.transformers_turns)

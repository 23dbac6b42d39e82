"""The speed: agents talk to the same sessions through the front end and straight to their homes, in turns.

A home is a server. So what clients get from the homes themselves is what these do alone, on the same cores.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kakeya.bench.benchmark import Run, Work
from kakeya.bench.cluster.fleet import Fleet
from kakeya.bench.cluster.rows import ClusterResults, Speed
from kakeya.bench.stats import Samples
from kakeya.bench.witnesses import Ledger, Said, Witnesses
from kakeya.client import AsyncClient, AsyncSession
from kakeya.cluster.members import credentials, home_in
from kakeya.errors import RemoteError
from kakeya.serving.keys import OPEN_OWNER

if TYPE_CHECKING:
    from kakeya.bench.cluster.benchmark import ClusterBench

THROUGH, DIRECT = "through the front end", "straight to the homes"
PATHS = (THROUGH, DIRECT)
MESSAGE = 16
"""Tokens that an agent says at each of its turns."""
_CALL_TIMEOUT_S = 600.0
# Which repetition times which agent's stream: not always one of the same home.
_STEP = 7


class HomeClient(AsyncClient):
    """Calls a home as front ends do: with the cluster's secret, in the name of whoever has no key."""

    def __init__(self, address: str, secret: str) -> None:
        super().__init__(address, timeout=_CALL_TIMEOUT_S)
        self._connection.metadata = credentials(secret, OPEN_OWNER)


@dataclass
class Agent:
    """One session by either path, and what its client was told."""

    sessions: dict[str, AsyncSession]
    ledger: Ledger
    chance: random.Random
    vocabulary: int

    async def turn(self, path: str, tokens: int) -> float:
        """Say something and hear the answer; seconds for each token after the first.

        Raises RemoteError for an answer of another length.
        """
        message = tuple(self.chance.randrange(self.vocabulary) for _ in range(MESSAGE))
        session, seed = self.sessions[path], self.chance.randrange(1000)
        await session.append(message, expected_history_length=self.ledger.length)
        self.ledger.steps.append(Said(message))
        said, times = [], []
        temperature = 1.0 if seed % 2 else 0.0
        async for token in session.generate(tokens, seed=seed, temperature=temperature):
            said.append(token.id)
            times.append(time.perf_counter())
        self.ledger.steps.append(Said(tuple(said), seed))
        if len(said) != tokens:
            raise RemoteError(f"a stream gave {len(said)} tokens instead of {tokens}")
        return (times[-1] - times[0]) / max(1, tokens - 1)


class Race:
    """Both paths take turns, each repetition begins with the other one."""

    def __init__(self, bench: "ClusterBench", run: Run[ClusterResults], fleet: Fleet) -> None:
        self._bench, self._run, self._fleet = bench, run, fleet
        self._crowds: dict[str, list[float]] = {path: [] for path in PATHS}
        self._streams: dict[str, list[float]] = {path: [] for path in PATHS}
        self._agents: list[Agent] = []
        self.told = Witnesses()

    async def measure(self) -> "Race":
        """Returns after all repetitions, or after a signal with those that are whole."""
        async with self._clients() as (through, direct):
            await self._meet(through, direct)
            work = self._run.work(len(PATHS) * (self._bench.repeats + 1))
            for path in PATHS:  # what comes first computes and compiles more
                work.piece(f"warming up {path}")
                await self._crowd(path)
            with self._run.watching(self._fleet.family()):
                for number in range(self._bench.repeats):
                    if not await self._repeat(number, work):
                        break
        return self

    def results(self, wrong: int) -> Speed:
        """What it came to, with so many generates that are wrong."""
        homes = Counter(home_in(agent.ledger.session.session_id) for agent in self._agents)
        return Speed(
            agents=len(self._agents),
            homes=tuple(homes[name] for name in sorted(homes)),
            through=Samples.of(self._crowds[THROUGH]),
            direct=Samples.of(self._crowds[DIRECT]),
            through_token=Samples.of(self._streams[THROUGH]),
            direct_token=Samples.of(self._streams[DIRECT]),
            generates=self.told.generates,
            wrong=wrong,
        )

    @asynccontextmanager
    async def _clients(self) -> AsyncIterator[tuple[list[AsyncClient], dict[str, AsyncClient]]]:
        """As many connections to the front end as to the homes."""
        homes = self._fleet.cluster.view().homes
        async with AsyncExitStack() as stack:
            through = [AsyncClient(self._fleet.address, timeout=_CALL_TIMEOUT_S) for _ in homes]
            direct = {home.name: HomeClient(home.address, self._fleet.secret) for home in homes}
            for client in (*through, *direct.values()):
                await stack.enter_async_context(client)
            yield through, dict(direct)

    async def _meet(self, through: list[AsyncClient], direct: dict[str, AsyncClient]) -> None:
        """Sessions go where the front end places them."""
        vocabulary = (await through[0].server_info()).vocab_size
        for number in range(self._bench.talkers):
            session = await through[number % len(through)].create_session(ignore_eos=True)
            home = direct[home_in(session.session_id)]
            paths = {THROUGH: session, DIRECT: home.session(session.session_id)}
            chance = random.Random(f"{self._bench.seed} talker {number}")
            self.told.ledgers.append(Ledger(session))
            self._agents.append(Agent(paths, self.told.ledgers[-1], chance, vocabulary))

    async def _repeat(self, number: int, work: Work) -> bool:
        """Whether it came to its end."""
        ask, found = self._run.interruption.unless_asked, dict[str, tuple[float, float]]()
        for path in PATHS if number % 2 == 0 else reversed(PATHS):
            work.piece(f"repetition {number + 1}, {path}")
            crowd, stream = await ask(self._crowd(path)), await ask(self._stream(path, number))
            if crowd is None or stream is None:
                return False
            found[path] = crowd, stream
        for path, (crowd, stream) in found.items():
            self._crowds[path].append(crowd)
            self._streams[path].append(stream)
        return True

    async def _crowd(self, path: str) -> float:
        """Tokens a second of all agents, from the first call to the last token."""
        began, tokens = time.perf_counter(), self._bench.turn_tokens
        await asyncio.gather(*(agent.turn(path, tokens) for agent in self._agents))
        return len(self._agents) * tokens / (time.perf_counter() - began)

    async def _stream(self, path: str, number: int) -> float:
        """Seconds for each token of one agent's stream, while the others are silent."""
        agent = self._agents[number * _STEP % len(self._agents)]
        return await agent.turn(path, self._bench.stream_tokens)

"""The storm: agents talk to the front end while parts of the cluster die and nodes are drained.

In the end every session's history is compared with that of a session on a server of its own.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kakeya.bench.benchmark import Run
from kakeya.bench.cluster.fleet import Fleet
from kakeya.bench.cluster.rows import DRAIN, HEAD, KILLS, ClusterResults, Event
from kakeya.bench.witnesses import Witnesses
from kakeya.dialing import Retry
from kakeya.errors import ConfigError, KakeyaError, PeerFailed

if TYPE_CHECKING:
    from kakeya.bench.cluster.benchmark import ClusterBench
    from kakeya.client import AsyncClient

# Agents must not give up before a home is back, however busy the machine is.
_RETRY = Retry(attempts=4000, first_delay=0.05, longest_delay=0.5)
# How long nobody starts the next head. Ray's nodes end when they have none for a minute.
_HEAD_AWAY_S = 3.0
_ALL_BACK_S = 300.0


class Storm:
    """The agents, and what happens to the cluster meanwhile. Its results are added to those `before`."""

    def __init__(
        self, bench: "ClusterBench", run: Run[ClusterResults], fleet: Fleet, before: ClusterResults
    ) -> None:
        self._bench, self._run, self._fleet, self._before = bench, run, fleet, before
        self._chance = random.Random(bench.seed)
        self._events: list[Event] = []
        self._twice = 0
        self.told = Witnesses()

    async def rage(self) -> "Storm":
        """Returns when all has happened, or after a signal."""
        from kakeya.client import AsyncClient

        async with AsyncClient(self._fleet.address, timeout=600.0, retry=_RETRY) as client:
            vocabulary = (await client.server_info()).vocab_size
            agents = [
                asyncio.create_task(
                    self.told.live(client, random.Random(f"{self._bench.seed} {number}"), vocabulary)
                )
                for number in range(self._bench.agents)
            ]
            try:
                await self._happen(client)
            finally:  # or they would go on without an end where something goes wrong
                self.told.over.set()
            await asyncio.gather(*agents)
            self._twice = await asyncio.to_thread(self._found_twice)
        return self

    def results(self, wrong: int) -> ClusterResults:
        """What it came to, with so many generates that are wrong."""
        told = self.told
        return replace(
            self._before,
            events=tuple(self._events),
            sessions=len(told.ledgers),
            forks=told.forks,
            appended_tokens=told.appended_tokens,
            generated_tokens=told.generated_tokens,
            generates=told.generates,
            checked_lengths=told.checked,
            lost=told.lost,
            wrong=wrong,
            twice=self._twice,
            errors=tuple(told.errors),
        )

    async def _happen(self, client: "AsyncClient") -> None:
        bench = self._bench
        kills = [KILLS[number % len(KILLS)] for number in range(bench.kills)]
        plan = [*kills, *[DRAIN] * bench.drains]
        self._chance.shuffle(plan)
        for number, kind in enumerate(plan):
            await asyncio.sleep(bench.pause_s)
            if self._run.interruption.reason is not None:
                return
            self._run.progress(number / len(plan), f"{number + 1} of {len(plan)}: {kind}")
            self._events.append(await self._one(client, kind))
            self._run.checkpoint(self.results(0))

    async def _one(self, client: "AsyncClient", kind: str) -> Event:
        if kind == DRAIN:
            return await self._drain()
        if kind == HEAD:
            return await self._kill_head(client)
        return await self._kill(client, kind)

    async def _kill(self, client: "AsyncClient", kind: str) -> Event:
        """Kill it, and wait for an answer about a session that it had."""
        home = await asyncio.to_thread(self._some_home)
        met = await asyncio.to_thread(self._sessions_at, home)
        began = time.monotonic()
        await asyncio.to_thread(self._fleet.kill, kind, home)
        mending = asyncio.create_task(asyncio.to_thread(self._fleet.mend, kind))
        await _answer(client, home, met)
        seconds = time.monotonic() - began
        await mending
        return Event(kind, seconds)

    async def _kill_head(self, client: "AsyncClient") -> Event:
        """Kill Ray's head. Agents go on. Then nodes join the next head, and the homes start on it."""
        home = await asyncio.to_thread(self._some_home)
        met = await asyncio.to_thread(self._sessions_at, home)
        await asyncio.to_thread(self._fleet.kill_head)
        before = self.told.generates
        await asyncio.sleep(_HEAD_AWAY_S)
        answered = self.told.generates - before
        await asyncio.to_thread(self._fleet.start_head)
        began = time.monotonic()
        joining = asyncio.create_task(asyncio.to_thread(self._fleet.join_next_head))
        await asyncio.to_thread(self._until_away, home)
        await _answer(client, home, met)
        seconds = time.monotonic() - began
        await joining
        return Event(HEAD, seconds, answered=answered)

    async def _drain(self) -> Event:
        while True:
            home = await asyncio.to_thread(self._some_home)
            try:
                drained, _ = await asyncio.to_thread(self._fleet.cluster.drain, home.node)
                break
            except ConfigError:  # killed just now, it has come back at another node
                continue
        await asyncio.to_thread(self._fleet.settle)
        return Event(DRAIN, drained.seconds, drained.sessions, drained.bytes)

    def _some_home(self) -> Any:
        """A home that is there, once all are."""
        deadline = time.monotonic() + _ALL_BACK_S
        while time.monotonic() < deadline:
            homes = list(self._fleet.cluster.view().homes)
            if len(homes) >= self._bench.nodes and not any(home.silent for home in homes):
                for home in homes:  # one may serve before its actor has answered Ray
                    self._fleet.process_of(home)
                return self._chance.choice(homes)
            time.sleep(0.1)
        raise PeerFailed("the homes of the cluster do not come back")

    def _until_away(self, home: Any) -> None:
        """Until nobody answers where the home was."""
        from kakeya.cluster.calling import HomeCalls

        deadline = time.monotonic() + _ALL_BACK_S
        with suppress(KakeyaError), HomeCalls(home.address, self._fleet.secret) as calls:
            while time.monotonic() < deadline:
                calls.movable()
                time.sleep(0.02)

    def _sessions_at(self, home: Any) -> list[str]:
        from kakeya.cluster.calling import HomeCalls

        with suppress(KakeyaError), HomeCalls(home.address, self._fleet.secret) as calls:
            return list(calls.movable())
        return []

    def _found_twice(self) -> int:
        """Sessions that more than one home has, once all are there again."""
        self._some_home()
        homes = self._fleet.cluster.view().homes
        found = Counter(session for home in homes for session in self._sessions_at(home))
        return sum(times > 1 for times in found.values())


async def _answer(client: "AsyncClient", home: Any, met: Sequence[str]) -> None:
    """Wait for an answer about one of these sessions of a home, or about one that it never had."""
    with suppress(KakeyaError):  # one that its agent has closed is answered as well
        await client.session(met[0] if met else f"{home.name}.unknown").info()

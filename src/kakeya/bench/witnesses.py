"""Agents that remember what they were told, and check in the end that all of it is true.

They append, generate, leave streams early, fork and close through the SDK, which tries again what a crash cut
off. Whatever happens to the servers, they may only see pauses.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kakeya.config import CacheConfig
from kakeya.errors import KakeyaError
from kakeya.types import SamplingParams, TokenEvent, TokenRange

if TYPE_CHECKING:
    from kakeya.client import AsyncClient, AsyncSession
    from kakeya.runtime import Runtime


@dataclass(frozen=True)
class Said:
    """A step of a session: tokens appended, those of a generate, whose seed is known, or `named` ranges that
    the next turn sees again.

    Of a generate whose stream was left early these are the tokens that were read; `unread` more were sent.
    """

    tokens: tuple[int, ...]
    seed: int | None = None
    named: tuple[TokenRange, ...] = ()
    unread: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens) + self.unread


@dataclass
class Ledger:
    """What a client was told of one session."""

    session: "AsyncSession"
    steps: list[Said] = field(default_factory=list)
    recall: int = 0
    """How many tokens a turn may see again."""

    @property
    def length(self) -> int:
        return sum(step.length for step in self.steps)

    @property
    def answered(self) -> int:
        """How long the history was at the end of the last answer."""
        last = max((place for place, step in enumerate(self.steps) if step.seed is not None), default=-1)
        return sum(step.length for step in self.steps[: last + 1])


@dataclass
class Witnesses:
    """What all agents were told, and what of it was not true. `over` ends them. Half of the sessions see up
    to `cache.recall` tokens of their past again."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    ledgers: list[Ledger] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    forks: int = 0
    checked: int = 0
    lost: int = 0
    """Sessions whose history has another length than their client was told."""
    recalled: int = 0
    """Answers that saw something again."""
    left: int = 0
    """Streams that were left before their end."""

    @property
    def appended_tokens(self) -> int:
        return sum(len(step.tokens) for step in self._steps() if step.seed is None)

    @property
    def generated_tokens(self) -> int:
        return sum(len(step.tokens) for step in self._steps() if step.seed is not None)

    @property
    def generates(self) -> int:
        return sum(step.seed is not None for step in self._steps())

    async def live(self, client: "AsyncClient", chance: random.Random, vocabulary: int) -> None:
        """One agent: it uses a session for a while, checks it, and takes another."""
        while not self.over.is_set():
            ledger: Ledger | None = None
            recall = self.cache.recall if chance.random() < 0.5 else 0
            try:
                session = await client.create_session(ignore_eos=True, recall_tokens=recall)
                ledger = self._opened(session, recall=recall)
                for _ in range(chance.randint(4, 30)):
                    ledger = await self._step(ledger, chance, vocabulary)
                    if self.over.is_set():
                        break
                await self._check(ledger)
            except KakeyaError as error:
                where = "" if ledger is None else f" after {ledger.length} tokens"
                self.errors.append(f"{type(error).__name__}{where}: {error}")

    def wrong_generates(self, runtime: "Runtime", place: int) -> int:
        """How many generates of the session at this place an uninterrupted session answers differently."""
        return _wrong_generates(runtime, self.ledgers[place])

    def _steps(self) -> list[Said]:
        return [step for ledger in self.ledgers for step in ledger.steps]

    def _opened(self, session: "AsyncSession", steps: Sequence[Said] = (), recall: int = 0) -> Ledger:
        ledger = Ledger(session, list(steps), recall)
        self.ledgers.append(ledger)
        return ledger

    async def _step(self, ledger: Ledger, chance: random.Random, vocabulary: int) -> Ledger:
        """Append, generate to the end or not, name what to see again, or fork and go on with the fork."""
        kind = chance.random()
        if ledger.recall and chance.random() < 0.2:
            await self._name(ledger, chance)
        if not ledger.steps or kind < 0.45:
            tokens = _some_tokens(chance, vocabulary)
            await ledger.session.append(tokens, expected_history_length=ledger.length)
            ledger.steps.append(Said(tokens))
        elif kind < 0.8:
            await self._generate(ledger, chance)
        elif kind < 0.9:
            await self._leave(ledger, chance, vocabulary)
        else:
            fork = self._opened(await ledger.session.fork(), ledger.steps, ledger.recall)
            self.forks += 1
            await self._check(ledger)
            return fork
        return ledger

    async def _generate(self, ledger: Ledger, chance: random.Random) -> None:
        seed = chance.randrange(1000)
        stream = ledger.session.generate(chance.randint(1, 40), seed=seed, temperature=_temperature(seed))
        said = tuple([token.id async for token in stream])
        self.recalled += stream.result is not None and bool(stream.result.recalled)
        ledger.steps.append(Said(said, seed))

    async def _leave(self, ledger: Ledger, chance: random.Random, vocabulary: int) -> None:
        """Leave a stream before its end and append at once.

        What was sent is history, whether it was read or not. The reply to the append says how much that is.
        """
        seed, most = chance.randrange(1000), chance.randint(2, 40)
        stays, said = chance.randint(1, most - 1), list[int]()
        async with ledger.session.generate(most, seed=seed, temperature=_temperature(seed)) as stream:
            async for token in stream:
                said.append(token.id)
                if len(said) == stays:
                    break
        tokens = _some_tokens(chance, vocabulary)
        unread = await ledger.session.append(tokens) - ledger.length - len(said) - len(tokens)
        self.left += 1
        self.lost += not 0 <= unread <= most - stays
        ledger.steps += Said(tuple(said), seed, unread=unread), Said(tokens)

    async def _name(self, ledger: Ledger, chance: random.Random) -> None:
        """Have the next turn see some of what has left the window, if anything has."""
        if ledger.answered > self.cache.capacity:
            length = chance.randint(1, ledger.recall)
            start = chance.randint(self.cache.sink, ledger.answered - self.cache.window - length)
            named = (TokenRange(start, start + length),)
            await ledger.session.recall(named)
            ledger.steps.append(Said((), named=named))

    async def _check(self, ledger: Ledger) -> None:
        """The session is as long as its client was told, and says so when it is closed."""
        length = (await ledger.session.info()).history_length
        self.checked += 1
        self.lost += length != ledger.length
        with suppress(KakeyaError):
            await ledger.session.close()


def _some_tokens(chance: random.Random, vocabulary: int) -> tuple[int, ...]:
    return tuple(chance.randrange(vocabulary) for _ in range(chance.randint(1, 40)))


def _temperature(seed: int) -> float:
    return 1.0 if seed % 2 else 0.0


def _wrong_generates(runtime: "Runtime", ledger: Ledger) -> int:
    session, wrong = runtime.create_session(eos_token_ids=(), recall_tokens=ledger.recall), 0
    for step in ledger.steps:
        if step.named:
            runtime.recall(session, step.named)
            continue
        if step.seed is None:
            runtime.append(session, step.tokens)
            continue
        sampling = SamplingParams(seed=step.seed, temperature=_temperature(step.seed))
        events = list(runtime.generate(session, step.length, sampling))
        said = tuple(event.token_id for event in events if isinstance(event, TokenEvent))
        if said[: len(step.tokens)] != step.tokens:
            wrong += 1
            break  # what follows goes on from other tokens
    runtime.close_session(session)
    return wrong

"""The agents of `bench capacity`: each an ordinary SDK user with a channel and a session of its own."""

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from kakeya.bench.capacity_results import AgentRun
from kakeya.bench.prose import stretch
from kakeya.client import AsyncClient, AsyncSession
from kakeya.errors import KakeyaError

# Waiting is part of what is measured: a limit only keeps a server that hangs from hanging us.
CALL_TIMEOUT_S = 600.0
GENERATE_TIMEOUT_S = 7200.0


@dataclass(frozen=True)
class Work:
    """What one agent says: a context that fills its memory, then a prompt to be answered.

    Answers are sampled by the agent's own seed, so that no two agents are expected to say the same.
    """

    context: Sequence[int]
    prompt: Sequence[int]
    gen_tokens: int
    seed: int

    @property
    def tokens(self) -> int:
        """How much there is to compute."""
        return len(self.context) + len(self.prompt) + self.gen_tokens


def work_of(agent: int, text: Sequence[int], *, context: int, prompt: int, gen: int, seed: int) -> Work:
    """The same for the same agent and seed, whatever the level: other places of the text for others."""
    dice = random.Random(f"{seed}/{agent}")
    return Work(
        context=stretch(text, dice.randrange(len(text)), context),
        prompt=stretch(text, dice.randrange(len(text)), prompt),
        gen_tokens=gen,
        seed=dice.randrange(2**32),
    )


class Agent:
    """One agent's life at one level. The first error ends it: later parts are left out, `run` tells why."""

    def __init__(self, number: int, address: str, work: Work) -> None:
        self.run = AgentRun(number)
        self.output: list[int] = []
        self.work = work
        self._client = AsyncClient(address, timeout=CALL_TIMEOUT_S)
        self._session: AsyncSession | None = None

    async def create(self) -> None:
        """Connect and open a session."""
        await self._guarded("create", self._create)

    async def fill(self) -> None:
        """Have the context computed."""
        if self.work.context:
            await self._guarded("fill", self._fill)

    async def turn(self) -> None:
        """Say the prompt and read the answer into `output`."""
        await self._guarded("turn", self._turn)

    async def look(self) -> None:
        """Ask what the session holds."""
        await self._guarded("look", self._look)

    async def leave(self) -> None:
        """Close the session and the connection, whatever happened."""
        try:
            if self._session is not None:
                await self._session.close()
        except KakeyaError:
            pass  # the run has told already, or the session went with its server
        finally:
            await self._client.close()

    def check(self, expected: Sequence[int]) -> None:
        """Compare the answer, if there is one, with that of the solo run."""
        if self.run.generate_s is not None:
            self.run = replace(self.run, correct=list(expected) == self.output)

    async def _guarded(self, phase: str, part: Callable[[], Awaitable[None]]) -> None:
        if self.run.error_class is not None:
            return
        try:
            await part()
        except KakeyaError as error:
            name = type(error).__name__
            self.run = replace(self.run, error_phase=phase, error_class=name, error_str=str(error))

    async def _create(self) -> None:
        began = time.perf_counter()
        self._session = await self._client.create_session(label="bench capacity", ignore_eos=True)
        self.run = replace(self.run, create_s=time.perf_counter() - began)

    async def _fill(self) -> None:
        assert self._session is not None
        await self._session.append(self.work.context)
        # Appended tokens wait until a generate computes them.
        await self._generate(1)

    async def _turn(self) -> None:
        assert self._session is not None
        began = time.perf_counter()
        await self._session.append(self.work.prompt)
        self.output = await self._generate(self.work.gen_tokens)
        seconds = time.perf_counter() - began
        self.run = replace(self.run, generate_s=seconds, generated=len(self.output))

    async def _look(self) -> None:
        assert self._session is not None
        self.run = replace(self.run, kv_live_bytes=(await self._session.info()).kv_live_bytes)

    async def _generate(self, count: int) -> list[int]:
        assert self._session is not None
        stream = self._session.generate(
            count, temperature=1.0, seed=self.work.seed, timeout=GENERATE_TIMEOUT_S
        )
        return [token.id async for token in stream]

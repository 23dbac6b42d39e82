"""Agents of `bench capacity`: who differs in what, why a level is not clean, and sessions that are lost."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from kakeya.bench import ramp
from kakeya.bench.capacity import Capacity
from kakeya.bench.processes import ServerProcess
from kakeya.bench.ramp import Agent, agent_of, level_of
from kakeya.errors import ResourceExhausted, StepFailed
from support.serving import close_sessions

ROOM, STEP = {"error": ResourceExhausted("no room")}, {"error": StepFailed("broken")}
DONE, WRONG = {"generate_s": 1.0, "output": [1, 2]}, {"generate_s": 1.0, "output": [1]}


@pytest.mark.parametrize(
    ("fared", "why"),
    [
        ([DONE, DONE, DONE], ""),
        ([DONE, WRONG, DONE], "1 wrong outputs"),
        ([WRONG, ROOM, ROOM], "1 wrong outputs; errors: 2 ResourceExhausted"),
        ([ROOM, STEP, ROOM], "errors: 2 ResourceExhausted, 1 StepFailed"),
        ([DONE, DONE, {}], "agents without an output"),
    ],
)
def test_a_level_that_is_not_clean_says_why(fared: list[dict[str, Any]], why: str) -> None:
    agents = [Agent(number, None, [], [1], 1, 0, **each) for number, each in enumerate(fared)]  # type: ignore[arg-type]
    level = level_of(agents, [[1, 2]] * 3, (0.1, 2.0, 4.0, 7.0), rss=10_500)
    assert level.stop() == (why and f"level 3: {why}")
    assert [error["agent"] for error in level.first_errors] == [
        number for number, each in enumerate(fared) if "error" in each and each not in fared[:number]
    ]
    assert (level.generate_p50_s is None) is (level.tokens_per_s is None) is (level.generate_ok == 0)


def test_agents_differ_and_are_the_same_again() -> None:
    bench = Capacity(context_len=40, prompt_len=5, gen_tokens=3, seed=7)

    def work(number: int, bench: Capacity = bench) -> tuple[Any, ...]:
        made = agent_of(bench, number, list(range(500)), "127.0.0.1:1")
        assert (made.tokens("create"), made.tokens("fill"), made.tokens("turn")) == (0, 40, 8)
        return made.context, made.prompt, made.seed

    assert work(0) == work(0)
    assert all(ours != theirs for ours, theirs in zip(work(0), work(1), strict=True))
    assert work(0) != work(0, replace(bench, seed=8))


@pytest.mark.parametrize("address", [None, "127.0.0.1:1"], ids=["lost its session", "has no server"])
def test_an_agent_leaves_whatever_happened(
    address: str | None, tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ramp, "CALL_TIMEOUT_S", 60 if address is None else 0.2)

    async def story() -> Agent:
        agent = agent_of(Capacity(context_len=0), 0, [5, 6, 7], address or tiny_server.address)
        await agent.do("create")
        await asyncio.to_thread(close_sessions, tiny_server.address)
        for part in ("fill", "turn", "look"):
            await agent.do(part)
        await agent.leave()
        return agent

    agent = asyncio.run(story())
    assert agent.error_phase == ("turn" if address is None else "create")
    assert agent.generate_s is agent.kv_live_bytes is None

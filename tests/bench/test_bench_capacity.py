"""`bench capacity` against real servers: clean ramps, full servers, wrong outputs, signals."""

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kakeya.bench import capacity
from kakeya.bench.agents import Agent, work_of
from kakeya.bench.capacity import CapacityBench, run
from kakeya.bench.capacity_page import capacity_page, capacity_picture, summary_table
from kakeya.bench.report import Report
from kakeya.bench.server_process import ServerProcess
from kakeya.cli.serve_options import ServeOptions
from kakeya.client import AsyncClient
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError

BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4


@pytest.fixture
def bench(chat_model: Path, tiny_engine: EngineConfig) -> Callable[..., CapacityBench]:
    def made(*levels: int, **changes: Any) -> CapacityBench:
        settings = {"prompt_len": 3, "gen_tokens": 4}
        return CapacityBench(str(chat_model), tiny_engine, levels, **(settings | changes))

    return made


def climb(bench: CapacityBench, on_progress: Callable[[str], None] = lambda work: None) -> Report:
    shares: list[float] = []

    def progress(done: float, work: str) -> None:
        shares.append(done)
        on_progress(work)

    report = run(bench, progress, lambda partial: None)
    assert shares == sorted(shares)
    assert 0 <= shares[0] <= shares[-1] <= 1
    return report


def test_a_ramp_on_a_server_of_its_own(chat_model: Path, tiny_engine: EngineConfig) -> None:
    config = replace(tiny_engine, capacity=4)
    checkpoints: list[Report] = []
    bench = CapacityBench(str(chat_model), config, (1, 4), prompt_len=3, gen_tokens=4)
    report = run(bench, lambda done, work: None, checkpoints.append)
    assert report.exit_status == 0
    assert all(gate.passed for gate in report.gates)
    summary = report.results["summary"]
    assert summary["max_concurrent_agents_clean"] == 4
    assert summary["outputs_checked"] == 5
    assert summary["distinct_solo_outputs"] == 4
    assert summary["stopped_by"] == "all levels were run"
    assert summary["per_session_kv_bytes"] == 32 * BYTES_PER_TOKEN
    assert summary["node_kv_upper_bound"] == 4 * summary["announced_kv_bytes_per_session"]
    assert [row["level"] for row in report.results["levels"]] == [1, 4]
    assert all(row["server_rss_bytes"] > 2**24 for row in report.results["levels"])
    assert report.config["open_files"]["after"] >= report.config["open_files"]["before"]
    assert report.config["context_len"] == 32
    assert [len(partial.results["levels"]) for partial in checkpoints] == [1, 2]
    assert all(partial.partial for partial in checkpoints)
    assert 0 <= report.results["bystanders_share"] <= 1
    page = capacity_page(report)
    for title in ("Generated tokens a second", "A turn", "Opening a session", "Memory"):
        assert f'aria-label="{title}"' in page
    assert capacity_picture(report.results).startswith("<svg")


@pytest.mark.usefixtures("on_shared_server")
def test_the_share_of_others_is_shown_and_changes_no_verdict(
    bench: Callable[..., CapacityBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capacity, "share_of", lambda bystanders: 0.415)
    report = climb(bench(2))
    assert ("share of the machine that others used", "41.5%") in summary_table(report.results).rows
    assert "41.5%" in capacity_page(report)
    assert all(gate.passed is not None for gate in report.gates)
    del report.results["bystanders_share"]
    assert ("share of the machine that others used", "–") in summary_table(report.results).rows


@pytest.mark.usefixtures("on_shared_server")
def test_a_full_server_stops_the_ramp(bench: Callable[..., CapacityBench]) -> None:
    report = climb(bench(2, 8, 9))
    first, second = report.results["levels"]
    assert (first["generate_ok"], first["errors"]) == (2, {})
    assert (second["created_ok"], second["errors"]) == (6, {"ResourceExhausted": 2})
    assert report.results["summary"]["stopped_by"] == "level 8: errors: 2 ResourceExhausted"
    assert report.results["summary"]["max_concurrent_agents_clean"] == 2
    assert report.exit_status == 1
    assert "ResourceExhausted" in capacity_page(report)


@pytest.mark.usefixtures("on_shared_server")
def test_a_wrong_output_is_found(
    bench: Callable[..., CapacityBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One agent gets another's tokens when it is in company, as with a cache that is shared."""
    real = Agent._turn

    async def mixed_up(self: Agent) -> None:
        await real(self)
        if self.run.agent == 1 and in_company:
            self.output[-1] += 1

    in_company = False

    def notice(work: str) -> None:
        nonlocal in_company
        in_company = work == "3 agents"

    monkeypatch.setattr(Agent, "_turn", mixed_up)
    report = climb(bench(1, 3, 4), notice)
    assert [row["wrong_outputs"] for row in report.results["levels"]] == [0, 1]
    assert report.results["summary"]["stopped_by"] == "level 3: 1 wrong outputs"
    assert report.exit_status == 1


@pytest.mark.usefixtures("on_shared_server")
def test_agents_leave_nothing_behind(bench: Callable[..., CapacityBench], tiny_server: ServerProcess) -> None:
    climb(bench(3, context_len=0))

    async def left() -> Sequence[object]:
        async with AsyncClient(tiny_server.address) as client:
            return await client.list_sessions()

    assert asyncio.run(left()) == []


@pytest.mark.usefixtures("on_shared_server")
def test_a_solo_run_that_fails_ends_the_ramp(
    bench: Callable[..., CapacityBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(agent: int, *_: object, **__: object) -> object:
        work = work_of(agent, [5, 6, 7], context=0, prompt=2, gen=2, seed=0)
        return replace(work, prompt=[10**6]) if agent == 2 else work

    monkeypatch.setattr(capacity, "work_of", impossible)
    report = climb(bench(1, 3))
    assert "solo run of agent 2 failed: InvalidArgument" in report.results["summary"]["stopped_by"]
    assert [row["level"] for row in report.results["levels"]] == [1]
    assert report.exit_status == 1


@pytest.mark.usefixtures("on_shared_server")
def test_a_signal_ends_the_ramp_with_a_whole_report(
    bench: Callable[..., CapacityBench], tiny_server: ServerProcess
) -> None:
    heard: list[str] = []

    def interrupt(work: str) -> None:
        heard.append(work)
        if heard.count("2 agents") == 2:  # one of them has filled its window
            os.kill(os.getpid(), signal.SIGINT)

    report = climb(bench(1, 2, gen_tokens=300), interrupt)
    assert report.results["abort_reason"] == "SIGINT"
    assert report.results["summary"]["stopped_by"] == "aborted by SIGINT at level 2"
    assert not report.partial
    assert [row["level"] for row in report.results["levels"]] == [1]
    test_agents_leave_nothing_behind(bench, tiny_server)


def test_agents_differ_and_are_the_same_again() -> None:
    text = list(range(500))
    work = [work_of(agent, text, context=40, prompt=5, gen=3, seed=7) for agent in (0, 1, 0)]
    assert work[0] == work[2] != work[1]
    assert work[0].seed != work[1].seed
    assert work[0].tokens == 48
    assert work_of(0, text, context=40, prompt=5, gen=3, seed=8) != work[0]


def test_an_agent_whose_server_is_gone_tells_so_and_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> Agent:
        agent = Agent(0, "127.0.0.1:1", work_of(0, [1, 2], context=1, prompt=1, gen=1, seed=0))
        agent._client = AsyncClient("127.0.0.1:1", timeout=0.2)
        for part in (agent.create, agent.fill, agent.turn, agent.look, agent.leave):
            await part()
        agent.check([1])
        return agent

    run = asyncio.run(story()).run
    assert run.error_phase == "create"
    assert run.correct is None


@pytest.mark.usefixtures("on_shared_server")
def test_an_agent_may_lose_its_session_before_it_leaves(tiny_server: ServerProcess) -> None:
    async def story() -> None:
        agent = Agent(0, tiny_server.address, work_of(0, [1, 2], context=1, prompt=1, gen=1, seed=0))
        await agent.create()
        async with AsyncClient(tiny_server.address) as client:
            for session in await client.list_sessions():
                await client.session(session.session_id).close()
        await agent.leave()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("levels", "changes", "message"),
    [
        ((), {}, "levels must be rising"),
        ((0, 1), {}, "levels must be rising"),
        ((4, 2), {}, "levels must be rising"),
        ((2, 2), {}, "levels must be rising"),
        ((1,), {"context_len": -1}, "context-len must be at least 0"),
        ((1,), {"prompt_len": 0}, "prompt-len must be at least 1"),
        ((1,), {"gen_tokens": 0}, "gen-tokens must be at least 1"),
    ],
)
def test_bad_settings_are_named(
    bench: Callable[..., CapacityBench], levels: tuple[int, ...], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(*levels, **changes)


def test_the_server_gets_room_for_all_and_no_more_than_the_engine_takes(
    bench: Callable[..., CapacityBench],
) -> None:
    most = EngineConfig.max_waiting
    flags = bench(most + 10).server_flags()
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert set(given) <= {f"--{name.replace('_', '-')}" for name in ServeOptions.__dataclass_fields__}
    assert given["--max-concurrent"] == str(most)
    assert int(given["--queue-depth"]) >= 10
    assert int(given["--max-concurrent-rpcs"]) >= most + 10
    assert given["--queue-max-wait-s"] == "0"

"""`bench capacity`: what it concludes; clean ramps, full servers, wrong outputs, signals on real servers."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kakeya.bench import capacity
from kakeya.bench.capacity import Agent, Capacity, CapacityResults, Level, Summary, Work, level_row, work_of
from kakeya.bench.page import report_page
from kakeya.bench.processes import Bystanders, ServerProcess
from kakeya.bench.report import Gate, Report, as_json, from_json
from kakeya.cli.serve_options import ServeOptions
from kakeya.client import AsyncClient
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError

BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
NO_WORK = Work([], [1], 1, 0)
SUMMARY = Summary(0, 0, 0, 0, 2, 2, None, 1000, 8000, 0.1, 10_000, 10_500, "the end")


def agent(number: int, **fared: Any) -> Agent:
    return Agent(number, NO_WORK, None, **fared)  # type: ignore[arg-type]


def good(number: int, seconds: float = 1.0, **changes: Any) -> Agent:
    fared = {"create_s": 0.01, "generate_s": seconds, "correct": True, "kv_live_bytes": 900}
    return agent(number, **({**fared, "output": [1] * 16} | changes))


def refused(number: int, phase: str = "create", name: str = "ResourceExhausted") -> Agent:
    return agent(number, error_phase=phase, error_class=name, error_str=f"no room for {number}")


def row(*agents: Agent) -> Level:
    return level_row(len(agents), agents, (0.1, 2.0, 4.0, 7.0), rss=10_500)


def judged(*levels: Level, top: int = 2, **changes: Any) -> dict[str, Gate]:
    """The gates of a ramp to `top` that ran these levels."""
    ramp = object.__new__(capacity._Ramp)
    info = type("Info", (), {"kv_bytes_per_session": 1000, "capacity": 8})
    solo = [[0], [1]]
    ramp.__dict__ |= {"levels": list(levels), "info": info, "solo": solo, "stopped": "the end"}
    ramp.__dict__ |= {"ready_rss": 10_000, "peak_rss": 10_500} | changes
    bench = Capacity(levels=f"1,{top}")
    return {gate.name: gate for gate in bench.gates(ramp.results())}


def test_a_clean_level_in_numbers() -> None:
    level = row(good(0, 1.0), good(1, 3.0))
    assert level.created_ok == level.generate_ok == level.level == 2
    assert (level.wrong_outputs, level.errors) == (0, {})
    assert (level.generate_p50_s, level.create_p50_s) == (2.0, 0.01)
    assert level.generate_p95_s == pytest.approx(2.9)
    assert level.tokens_per_s == 32 / 4.0
    assert level.per_session_kv_bytes == 900
    assert (level.wall_s, level.fill_wall_s, level.server_rss_bytes) == (7.0, 2.0, 10_500)
    assert level.is_clean()
    assert level.stop() == ""


def test_errors_are_counted_by_class_with_an_example_of_each() -> None:
    level = row(good(0), refused(1), refused(2), refused(3, "turn", "StepFailed"))
    assert level.errors == {"ResourceExhausted": 2, "StepFailed": 1}
    assert [(e["class"], e["phase"], e["agent"]) for e in level.first_errors] == [
        ("ResourceExhausted", "create", 1),
        ("StepFailed", "turn", 3),
    ]
    assert level.created_ok == 1
    assert not level.is_clean()
    assert level.stop() == "level 4: errors: 2 ResourceExhausted, 1 StepFailed"


def test_a_wrong_output_makes_a_level_unclean() -> None:
    level = row(good(0), good(1, correct=False))
    assert level.wrong_outputs == 1
    assert level.stop() == "level 2: 1 wrong outputs"
    assert judged(row(good(0)), level)["wrong outputs"].passed is False


def test_a_level_where_not_all_came_through() -> None:
    assert row(good(0), agent(1)).stop() == "level 2: agents without an output"
    level = row(refused(0))
    assert level.generate_p50_s is level.tokens_per_s is level.per_session_kv_bytes is None


def test_a_clean_ramp_passes_and_one_that_did_not_reach_the_top_fails() -> None:
    assert all(gate.passed for gate in judged(row(good(0)), row(good(0), good(1))).values())
    assert judged(row(good(0)), top=4)["agents at once, all clean"].passed is False
    assert judged(row(good(0), refused(1)))["errors"].passed is False


def test_memory_beyond_the_announced_fails() -> None:
    greedy = row(good(0), good(1, kv_live_bytes=1001))
    assert judged(greedy)["KV bytes of a session over the announced ones"].passed is False
    memory = "server memory, peak over when it was ready"
    assert judged(row(good(0)), peak_rss=11_100)[memory].passed is False
    assert judged(row(good(0)), peak_rss=None)[memory].passed is None


def test_outputs_that_are_all_alike_prove_nothing() -> None:
    alike = judged(row(good(0), good(1)), solo=[[0]] * 4)["wrong outputs"]
    assert alike.passed is None
    assert "1 of 4 solo outputs" in alike.reason
    wrong = row(good(0), good(1, correct=False))
    assert judged(wrong, solo=[[0]] * 4)["wrong outputs"].passed is False


def test_nothing_checked_is_not_passed() -> None:
    verdicts = judged(row(refused(0)))
    assert verdicts["wrong outputs"].passed is None
    assert verdicts["KV bytes of a session over the announced ones"].passed is None
    assert verdicts["errors"].passed is False
    nothing = judged()
    assert (nothing["errors"].passed, nothing["errors"].reason) == (None, "no level was run")
    assert nothing["agents at once, all clean"].passed is False


def test_results_come_back_from_json() -> None:
    results = CapacityResults(SUMMARY, [row(good(0)), row(good(0), refused(1))])
    told = as_json(results)
    assert told["summary"]["peak_over_ready"] == 1.05
    assert from_json(CapacityResults, told) == results


@pytest.fixture
def bench(tiny: dict[str, Any]) -> Callable[..., Capacity]:
    def made(*levels: int, **changes: Any) -> Capacity:
        settings = {"prompt_len": 3, "gen_tokens": 4, "levels": ",".join(map(str, levels))}
        return Capacity(**(tiny | settings | changes))

    return made


def page_of(results: CapacityResults) -> str:
    return report_page("t", Report("capacity", {}, {}), Capacity.show(results))


def test_a_ramp_on_a_server_of_its_own(bench: Callable[..., Capacity], measure: Callable[..., Any]) -> None:
    measured = measure(bench(1, 4))
    assert all(gate.passed for gate in measured.gates.values())
    summary = measured.results.summary
    assert summary.levels_run == 2
    assert summary.max_concurrent_agents_clean == summary.distinct_solo_outputs == 4
    assert summary.outputs_checked == 5
    assert summary.stopped_by == "all levels were run"
    assert summary.per_session_kv_bytes == 32 * BYTES_PER_TOKEN
    assert summary.node_kv_upper_bound == 4 * summary.announced_kv_bytes_per_session
    assert [level.level for level in measured.results.levels] == [1, 4]
    assert all(level.server_rss_bytes > 2**24 for level in measured.results.levels)
    files = measured.run.facts["open_files"]
    assert files["after"] >= files["before"]
    assert [len(partial.levels) for partial in measured.checkpoints] == [1, 2]
    assert measured.shares == sorted(measured.shares)
    assert 0 <= measured.shares[0] <= measured.shares[-1] == 1
    assert 0 <= measured.results.bystanders_share <= 1
    page = page_of(measured.results)
    for title in ("Generated tokens a second", "A turn", "Opening a session", "Memory"):
        assert f'aria-label="{title}"' in page


@pytest.mark.usefixtures("on_shared_server")
def test_the_share_of_others_is_shown_and_changes_no_verdict(
    bench: Callable[..., Capacity], measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bystanders, "share", lambda self: 0.415)
    measured = measure(bench(2))
    assert "41.5%" in page_of(measured.results)
    assert all(gate.passed is not None for gate in measured.gates.values())
    assert '<td>share of the machine that others used</td><td class="number">–</td>' in page_of(
        replace(measured.results, bystanders_share=None)
    )


@pytest.mark.usefixtures("on_shared_server")
def test_a_full_server_stops_the_ramp(bench: Callable[..., Capacity], measure: Callable[..., Any]) -> None:
    measured = measure(bench(2, 8, 9))
    first, second = measured.results.levels
    assert (first.generate_ok, first.errors) == (2, {})
    assert (second.created_ok, second.errors) == (6, {"ResourceExhausted": 2})
    assert measured.results.summary.stopped_by == "level 8: errors: 2 ResourceExhausted"
    assert measured.results.summary.max_concurrent_agents_clean == 2
    assert measured.gates["errors"].passed is False
    assert "ResourceExhausted" in page_of(measured.results)


@pytest.mark.usefixtures("on_shared_server")
def test_a_wrong_output_is_found(
    bench: Callable[..., Capacity], measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One agent gets another's tokens when it is in company, as with a cache that is shared."""
    real = Agent._turn
    in_company = False

    async def mixed_up(self: Agent) -> None:
        await real(self)
        if self.number == 1 and in_company:
            self.output[-1] += 1

    def notice(work: str) -> None:
        nonlocal in_company
        in_company = work == "3 agents"

    monkeypatch.setattr(Agent, "_turn", mixed_up)
    measured = measure(bench(1, 3, 4), notice)
    assert [level.wrong_outputs for level in measured.results.levels] == [0, 1]
    assert measured.results.summary.stopped_by == "level 3: 1 wrong outputs"
    assert measured.gates["wrong outputs"].passed is False


def sessions_left(server: ServerProcess) -> int:
    async def left() -> int:
        async with AsyncClient(server.address) as client:
            return len(await client.list_sessions())

    return asyncio.run(left())


@pytest.mark.usefixtures("on_shared_server")
def test_agents_leave_nothing_behind(
    bench: Callable[..., Capacity], measure: Callable[..., Any], tiny_server: ServerProcess
) -> None:
    measure(bench(3, context_len=0))
    assert sessions_left(tiny_server) == 0


@pytest.mark.usefixtures("on_shared_server")
def test_a_solo_run_that_fails_ends_the_ramp(
    bench: Callable[..., Capacity], measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(bench: Capacity, agent: int, text: object) -> Work:
        return Work([], [10**6] if agent == 2 else [5, 6], 2, 0)

    monkeypatch.setattr(capacity, "work_of", impossible)
    measured = measure(bench(1, 3))
    assert "solo run of agent 2 failed: InvalidArgument" in measured.results.summary.stopped_by
    assert [level.level for level in measured.results.levels] == [1]
    assert measured.gates["agents at once, all clean"].passed is False


@pytest.mark.usefixtures("on_shared_server")
def test_a_signal_ends_the_ramp_with_whole_results(
    bench: Callable[..., Capacity], measure: Callable[..., Any], tiny_server: ServerProcess
) -> None:
    heard: list[str] = []

    def interrupt(work: str) -> None:
        heard.append(work)
        if heard.count("2 agents") == 4:  # both have a session, and one has filled its window
            os.kill(os.getpid(), signal.SIGINT)

    measured = measure(bench(1, 2, gen_tokens=300), interrupt)
    assert measured.results.abort_reason == "SIGINT"
    assert measured.results.summary.stopped_by == "aborted by SIGINT at level 2"
    assert [level.level for level in measured.results.levels] == [1]
    assert sessions_left(tiny_server) == 0


def test_agents_differ_and_are_the_same_again() -> None:
    text = list(range(500))
    bench = Capacity(context_len=40, prompt_len=5, gen_tokens=3, seed=7)
    work = [work_of(bench, number, text) for number in (0, 1, 0)]
    assert work[0] == work[2] != work[1]
    assert work[0].seed != work[1].seed
    assert (len(work[0].context), work[0].turn_tokens) == (40, 8)
    assert work_of(replace(bench, seed=8), 0, text) != work[0]


def test_an_agent_whose_server_is_gone_tells_so_and_leaves() -> None:
    async def story() -> Agent:
        lost = Agent(0, Work([1], [1], 1, 0), AsyncClient("127.0.0.1:1", timeout=0.2))
        for part in ("create", "fill", "turn", "look"):
            await lost.do(part)
        await lost.leave()
        lost.check([1])
        return lost

    lost = asyncio.run(story())
    assert (lost.error_phase, lost.correct) == ("create", None)


def test_an_agent_may_lose_its_session_before_it_leaves(tiny_server: ServerProcess) -> None:
    async def story() -> None:
        loser = Agent(0, NO_WORK, AsyncClient(tiny_server.address))
        await loser.do("create")
        async with AsyncClient(tiny_server.address) as client:
            for session in await client.list_sessions():
                await client.session(session.session_id).close()
        await loser.leave()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"levels": "0,1"}, "levels must be rising"),
        ({"levels": "4,2"}, "levels must be rising"),
        ({"levels": "2,2"}, "levels must be rising"),
        ({"levels": "1,x"}, "levels must be whole numbers with commas"),
        ({"levels": ""}, "levels must be whole numbers with commas"),
        ({"context_len": -1}, "context-len must be at least 0"),
        ({"prompt_len": 0}, "prompt-len must be at least 1"),
        ({"gen_tokens": 0}, "gen-tokens must be at least 1"),
    ],
)
def test_bad_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Capacity(**changes)


def test_the_server_gets_room_for_all_and_no_more_than_the_engine_takes() -> None:
    most = EngineConfig.max_waiting
    given = Capacity(levels=str(most + 10)).server_flags()
    flags = dict(zip(given[::2], given[1::2], strict=True))
    assert set(flags) <= {f"--{name.replace('_', '-')}" for name in ServeOptions.__dataclass_fields__}
    assert flags["--max-concurrent"] == str(most)
    assert int(flags["--queue-depth"]) >= 10
    assert int(flags["--max-concurrent-rpcs"]) >= most + 10
    assert flags["--queue-max-wait-s"] == "0"


def test_the_window_is_filled_unless_somebody_says_otherwise() -> None:
    assert Capacity().context_tokens() == 1028
    assert Capacity(context_len=0).context_tokens() == 0
    assert (Capacity(levels="3").sessions(), Capacity(levels="3", capacity=2).sessions()) == (3, 2)

"""`bench capacity`: its flags, gates and page; clean ramps, full servers, wrong outputs, signals."""

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import kakeya
from kakeya.bench import ramp
from kakeya.bench.capacity import Capacity
from kakeya.bench.page import report_page
from kakeya.bench.processes import ServerProcess
from kakeya.bench.ramp import Agent, CapacityResults
from kakeya.bench.report import Report, as_json, from_json
from kakeya.cli.serve_options import ServeOptions
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError

Bench = Callable[..., Capacity]
Measure = Callable[..., Any]
COMMITTED = Path(__file__).parents[2] / "docs" / "evidence" / "capacity-light.json"
KV_BYTES = 2 * 2 * 2 * 16 * 4 * 32
TOP, ERRORS, WRONG = "agents at once, all clean", "errors", "wrong outputs"
KV, RSS = "KV bytes of a session over the announced ones", "server memory, peak over when it was ready"
ALIKE = {"distinct_solo_outputs": 127}
NOTHING = {"levels_run": 0, "outputs_checked": 0, "per_session_kv_bytes": None}


@pytest.fixture(scope="module")
def clean() -> CapacityResults:
    """A clean ramp to 256 agents, as a report of an earlier version has it."""
    found: CapacityResults = from_json(CapacityResults, json.loads(COMMITTED.read_text())["results"])
    return replace(found, summary=replace(found.summary, levels_run=4))


@pytest.mark.parametrize(
    ("changes", "gate", "passed", "reason"),
    [
        *(({}, gate, True, "") for gate in (TOP, ERRORS, WRONG, KV, RSS)),
        ({"max_concurrent_agents_clean": 64}, TOP, False, "64 is not at least 256"),
        ({"errors": 1}, ERRORS, False, ""),
        (NOTHING, ERRORS, None, "no level was run"),
        ({"wrong_outputs": 1}, WRONG, False, ""),
        (ALIKE, WRONG, None, "only 127 of 256 solo outputs are distinct, so a mix-up could not be seen"),
        (ALIKE | {"wrong_outputs": 1}, WRONG, False, ""),
        ({"distinct_solo_outputs": 1, "solo_outputs": 1}, WRONG, True, ""),
        (NOTHING, WRONG, None, "no output was checked"),
        ({"per_session_kv_bytes": 24053761}, KV, False, ""),
        (NOTHING, KV, None, "no agent got an output"),
        ({"server_peak_rss": 2**33}, RSS, False, ""),
        ({"server_peak_rss": None}, RSS, None, "the server's memory was not seen"),
    ],
)
def test_gates(
    clean: CapacityResults, changes: dict[str, Any], gate: str, passed: bool | None, reason: str
) -> None:
    gates = Capacity().gates(replace(clean, summary=replace(clean.summary, **changes)))
    (judged,) = [each for each in gates if each.name == gate]
    assert judged.passed is passed
    assert reason in judged.reason


@pytest.fixture
def bench(tiny: dict[str, Any]) -> Bench:
    def made(*levels: int, **changes: Any) -> Capacity:
        settings = {"prompt_len": 3, "gen_tokens": 4, "levels": ",".join(map(str, levels))}
        return Capacity(**(tiny | settings | changes))

    return made


def page_of(results: CapacityResults) -> str:
    return report_page("t", Report("capacity", {}, {}), Capacity.show(results))


def sessions_left(server: ServerProcess) -> int:
    with kakeya.Client(server.address) as client:
        return len(client.list_sessions())


def test_a_ramp_on_a_server_of_its_own(bench: Bench, measure: Measure) -> None:
    measured = measure(bench(1, 4))
    results, summary = measured.results, measured.results.summary
    assert all(gate.passed for gate in measured.gates.values())
    assert (summary.levels_run, summary.outputs_checked) == (2, 5)
    assert summary.max_concurrent_agents_clean == summary.distinct_solo_outputs == 4
    assert summary.stopped_by == "all levels were run"
    assert summary.node_kv_upper_bound == 4 * summary.announced_kv_bytes_per_session
    for level, count in zip(results.levels, (1, 4), strict=True):
        assert level.level == level.created_ok == level.generate_ok == count
        assert (level.wrong_outputs, level.errors, level.first_errors) == (0, {}, [])
        assert 0 < level.create_p50_s <= level.create_p95_s <= level.create_wall_s
        assert 0 < level.generate_p50_s <= level.generate_p95_s <= level.turn_wall_s
        assert level.tokens_per_s == 4 * count / level.turn_wall_s
        assert level.create_wall_s + level.fill_wall_s + level.turn_wall_s < level.wall_s
        assert level.per_session_kv_bytes == summary.per_session_kv_bytes == KV_BYTES
        assert level.server_rss_bytes > 2**24
    assert measured.run.facts["open_files"]["after"] >= measured.run.facts["open_files"]["before"]
    assert [len(partial.levels) for partial in measured.checkpoints] == [1, 2]
    assert measured.shares == sorted(measured.shares)
    assert 0 <= measured.shares[0] <= measured.shares[-1] == 1
    assert 0 <= results.bystanders_share <= 1
    assert from_json(CapacityResults, as_json(results)) == results
    page = page_of(replace(results, bystanders_share=0.415))
    assert '<td>share of the machine that others used</td><td class="number">41.5%</td>' in page
    for title in ("Generated tokens a second", "A turn", "Opening a session", "Memory"):
        assert f'aria-label="{title}"' in page


@pytest.mark.usefixtures("on_shared_server")
def test_a_full_server_stops_the_ramp(bench: Bench, measure: Measure, tiny_server: ServerProcess) -> None:
    measured = measure(bench(2, 8, 9, context_len=0))
    (first, second), summary = measured.results.levels, measured.results.summary
    assert (first.generate_ok, first.errors) == (2, {})
    assert (second.created_ok, second.errors) == (6, {"ResourceExhausted": 2})
    (example,) = second.first_errors
    assert (example["class"], example["phase"]) == ("ResourceExhausted", "create")
    assert (summary.max_concurrent_agents_clean, summary.errors, summary.outputs_checked) == (2, 2, 8)
    assert summary.stopped_by == "level 8: errors: 2 ResourceExhausted"
    assert measured.gates[ERRORS].passed is False
    assert "<td>ResourceExhausted</td><td>create</td>" in page_of(measured.results)
    assert sessions_left(tiny_server) == 0


@pytest.mark.usefixtures("on_shared_server")
def test_a_wrong_output_is_found(bench: Bench, measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    """One agent gets another's tokens when it is in company, as with a cache that is shared."""
    real, in_company = Agent.turn, False

    async def mixed_up(self: Agent) -> None:
        await real(self)
        self.output[-1] += self.number == 1 and in_company

    def notice(work: str) -> None:
        nonlocal in_company
        in_company = work == "3 agents"

    monkeypatch.setattr(Agent, "turn", mixed_up)
    measured = measure(bench(1, 3, 4), notice)
    assert [level.wrong_outputs for level in measured.results.levels] == [0, 1]
    assert measured.results.summary.stopped_by == "level 3: 1 wrong outputs"
    assert measured.gates[WRONG].passed is False


@pytest.mark.usefixtures("on_shared_server")
def test_a_failed_solo_run_ends_the_ramp(
    bench: Bench, measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = ramp.agent_of

    def impossible(bench: Capacity, number: int, *where: Any) -> Agent:
        return replace(real(bench, number, *where), prompt=[10**6] if number == 2 else [5, 6])

    monkeypatch.setattr(ramp, "agent_of", impossible)
    measured = measure(bench(1, 3))
    assert "solo run of agent 2 failed: InvalidArgument: " in measured.results.summary.stopped_by
    assert [level.level for level in measured.results.levels] == [1]
    assert measured.results.summary.solo_outputs == 2
    assert measured.gates[TOP].passed is False


@pytest.mark.usefixtures("on_shared_server")
def test_a_signal_ends_the_ramp_with_whole_results(
    bench: Bench, measure: Measure, tiny_server: ServerProcess
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"levels": levels}, "levels must be rising") for levels in ("0,1", "4,2", "2,2")),
        *(({"levels": levels}, "levels must be whole numbers with commas") for levels in ("1,x", "")),
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
    assert (flags["--max-concurrent"], flags["--queue-max-wait-s"]) == (str(most), "0")
    assert int(flags["--queue-depth"]) >= 10
    assert int(flags["--max-concurrent-rpcs"]) >= most + 10
    assert (Capacity().context_tokens(), Capacity(context_len=0).context_tokens()) == (1028, 0)
    assert (Capacity(levels="3").sessions(), Capacity(levels="3", capacity=2).sessions()) == (3, 2)

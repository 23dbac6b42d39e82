"""`bench load`: what is concluded and shown, and runs on a real server."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from kakeya.bench import arrivals, load
from kakeya.bench.arrivals import UNFINISHED, Arrival, Outcome, Step, play
from kakeya.bench.load import NO_PEER, NOT_MEASURED, OURS, PEER, Load, LoadResults
from kakeya.bench.processes import ServerProcess
from kakeya.bench.registry import shown
from kakeya.bench.report import Report, as_json
from kakeya.bench.runner import main_chart
from kakeya.bench.tables import Chart, Table
from kakeya.client import Client
from kakeya.errors import ConfigError, RemoteError
from support.fakes import scripted_http, sse
from support.serving import close_sessions


def a_step(side: str = OURS, system: str = "none", rate: float = 1.0, **changes: Any) -> Step:
    """Of 10 seconds; all of its chats are good."""
    sent = round(10 * rate)
    given = {"sent": sent, "finished": sent, "good": sent, "failures": {}, "tokens": 40, "prompt_tokens": 90}
    times = {"first_token_p50_s": 0.1, "first_token_p95_s": 0.2, "gap_p50_s": 0.01, "gap_p95_s": 0.02}
    whole = given | times | {"cached_tokens": 45, "idle_share": 0.0, "wall_s": 20.0} | changes
    return Step(side, system, rate, 10.0, **whole)


def beside(ours: float, theirs: float, top: float = 4.0, share: float = 0.0) -> LoadResults:
    """Two rates; at the higher one both have this goodput."""
    steps = [
        a_step(side, system, rate, good=min(round(10 * rate), round(10 * goodput)))
        for system in ("none", "common")
        for side, goodput in ((OURS, ours), (PEER, theirs))
        for rate in (0.5, top)
    ]
    return LoadResults(steps, bystanders_share=share)


@pytest.mark.parametrize(
    ("results", "settings", "passed", "reason"),
    [
        (beside(3.0, 1.0), {}, True, "3 is at least 3"),
        (beside(2.9, 1.0), {}, False, "2.9 is not at least 3"),
        (beside(2.9, 1.0), {"model": "other.gguf"}, True, "2.9 is at least 1.5"),
        (beside(1.4, 1.0), {"model": "other.gguf"}, False, "1.4 is not at least 1.5"),
        (beside(0.0, 1.0), {}, False, "0 is not at least 3"),
        (beside(4.0, 4.0), {}, None, "both kept up with the highest rate: use higher --rates"),
        (beside(3.0, 4.0), {}, False, "0.75 is not at least 3"),
        (beside(3.0, 0.0), {}, None, "no chat of llama.cpp's was good: use lower --rates"),
        (beside(3.0, 1.0, share=0.3), {}, None, "others used 30% of the machine, so ratios mean nothing"),
        (beside(3.0, 1.0), {"peers": False}, None, NO_PEER),
        (LoadResults(), {}, None, NOT_MEASURED),
        (LoadResults([a_step(), a_step(system="common")]), {}, None, NOT_MEASURED),
    ],
)
def test_goodput_is_held_to_the_peers(
    results: LoadResults, settings: dict[str, Any], passed: bool | None, reason: str
) -> None:
    bench = Load(**({"peers": True, "rates": "0.5,4"} | settings))
    gates = {gate.name: gate for gate in bench.gates(results)}
    for system in ("none", "common"):
        gate = gates[f"goodput over llama.cpp's, system prompt: {system}"]
        assert (gate.passed, gate.reason) == (passed, reason)


def test_other_gates() -> None:
    bad = a_step(failures={UNFINISHED: 3, "answered 500": 2}, idle_share=0.06)
    results = LoadResults([a_step(), bad], bystanders_share=0.06)
    gates = {gate.name: gate for gate in Load(peers=True, system=load.SystemPrompt.NONE).gates(results)}
    assert gates["our errors"].value == 2
    assert [gate.passed for gate in gates.values()] == [None, False, False, False]
    theirs = a_step(PEER, failures={"answered 500": 2})
    good = Load(peers=True).gates(
        LoadResults([a_step(failures={UNFINISHED: 3}), theirs], bystanders_share=0.0)
    )
    assert [gate.passed for gate in good[2:]] == [True, True, True]
    assert [gate.passed for gate in Load().gates(LoadResults())] == [None] * 5


def test_what_is_shown() -> None:
    results = beside(3.0, 1.0)
    results.steps[0].failures[UNFINISHED] = 2
    tables = {each.title: each for each in Load.show(results) if isinstance(each, Table)}
    assert tables["Best goodput"].cells == [
        ["kakeya", "common", "3.00", "4", "0.5"],
        ["llama.cpp", "common", "1.00", "4", "0.5"],
        ["kakeya", "none", "3.00", "4", "0.5"],
        ["llama.cpp", "none", "1.00", "4", "0.5"],
    ]
    assert tables["Every rate"].cells[1] == [
        "kakeya", "common", "4", "40", "40", "75%", "3.00", "100 / 200", "10 / 20", "2", "1.0", "50%",
    ]  # fmt: skip
    assert tables["Chats that did not end well"].cells == [["kakeya", "none", "0.5", "2", UNFINISHED]]
    charts = [each for each in Load.show(results) if isinstance(each, Chart)]
    assert [chart.title for chart in charts] == ["Goodput", "First token, p95", "Gap between tokens, p95"]
    chart = main_chart(charts)
    assert chart is not None
    assert list(chart.at) == [0.5, 4.0]
    assert [(each.name, each.values) for each in chart.series] == [
        ("kakeya, common", [0.5, 3.0]),
        ("llama.cpp, common", [0.5, 1.0]),
        ("kakeya, none", [0.5, 3.0]),
        ("llama.cpp, none", [0.5, 1.0]),
    ]
    partial = Load.show(LoadResults([a_step(), a_step(rate=2.0), a_step(PEER)]))
    assert [each.values for each in main_chart(partial).series] == [[1.0, 2.0], [1.0, None]]  # type: ignore[union-attr]
    assert main_chart(Load.show(LoadResults())) is not None
    again = [each for each in shown(Report("load", {}, {}, as_json(results))) if isinstance(each, Table)]
    assert {each.title: each.cells for each in again} == {each.title: each.cells for each in tables.values()}


@pytest.fixture
def leave_nothing(tiny_server: ServerProcess) -> Iterator[None]:
    yield
    close_sessions(tiny_server.address)


USAGE = {"prompt_tokens": 9, "completion_tokens": 1}
SMALL = {"seconds": 1.0, "prompt_tokens": "4,6", "answer_tokens": "3,5", "system_tokens": 6}


@pytest.mark.usefixtures("on_shared_server", "leave_nothing")
def test_a_real_server_answers_everybody(tiny: dict[str, Any], measure: Callable[..., Any]) -> None:
    found = measure(Load(**tiny, **SMALL, rates="3,6"))
    steps = found.results.steps
    assert [(step.side, step.system, step.rate, step.sent) for step in steps] == [
        (OURS, "none", 3.0, 3),
        (OURS, "common", 3.0, 3),
        (OURS, "none", 6.0, 6),
        (OURS, "common", 6.0, 6),
    ]
    assert all(step.finished == step.sent and not step.failures for step in steps)
    assert all(step.sent <= step.tokens <= 5 * step.sent for step in steps)
    assert all(0 < step.first_token_p50_s <= step.first_token_p95_s < 2 for step in steps)
    assert steps[1].prompt_tokens > steps[0].prompt_tokens
    assert len(found.checkpoints) == 4
    assert found.shares[-1] <= 1.0
    assert found.gates["our errors"].passed is True
    assert found.gates["goodput over llama.cpp's, system prompt: none"].reason == NO_PEER
    assert found.run.facts["until_s"] == pytest.approx(1 + 2 + 5 * 0.06)
    assert 0 <= found.results.bystanders_share <= 1


def test_chats_go_over_grpc_as_well(
    tiny: dict[str, Any],
    measure: Callable[..., Any],
    on_shared_server: list[tuple[Any, ...]],
    tiny_server: ServerProcess,
) -> None:
    """With one session at once, the others wait for it, and nothing is left of them."""
    found = measure(Load(**tiny, **{**SMALL, "seconds": 0.5}, rates="8", over=load.Over.GRPC, capacity=1))
    assert on_shared_server == [(1, False)], "no HTTP is asked for, and no queue of the server's"
    alone, common = found.results.steps
    assert [(step.sent, step.finished, step.failures) for step in (alone, common)] == [(4, 4, {})] * 2
    assert 4 <= alone.tokens <= 20
    assert common.prompt_tokens > alone.prompt_tokens > 4 * 4
    assert all(0 < step.first_token_p50_s <= step.first_token_p95_s < 2 for step in (alone, common))
    assert found.gates["our errors"].passed is True
    with Client(tiny_server.address) as client:
        assert client.list_sessions() == []


@pytest.mark.usefixtures("on_shared_server", "leave_nothing")
def test_both_sides_get_the_same_chats_in_turns(
    tiny: dict[str, Any], measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Any] = []
    left: list[str] = []

    class Peer:
        pid = server_pid = os.getpid()
        facts: ClassVar = {"library": "one"}

        def __init__(self, path: str, threads: int, program: str | None, context: int, slots: int) -> None:
            assert (path, threads, program, context, slots) == (tiny["model"], 1, "x", 3 * 512, 3)
            self.address = address

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            left.append("peer")

    def answer(path: str, body: Any) -> tuple[int, str]:
        heard.append(body["messages"])
        return 200, sse([{"choices": [{"delta": {"content": "so"}}]}, {"choices": [], "usage": USAGE}])

    asked: list[list[Any]] = []
    monkeypatch.setattr(arrivals, "play", _noted(asked))
    monkeypatch.setattr(load, "LlamaServer", Peer)
    monkeypatch.setattr(load, "require_llama_server", lambda path, program, without: None)
    wanted = {"peers": True, "llama_server": Path("x"), "llama_slots": 3, "system": load.SystemPrompt.NONE}
    with scripted_http(answer) as address:
        found = measure(Load(**tiny, **SMALL, **wanted, rates="2,4"), model_path=Path(tiny["model"]))
    steps = found.results.steps
    assert [(step.side, step.rate) for step in steps] == [(OURS, 2.0), (PEER, 2.0), (PEER, 4.0), (OURS, 4.0)]
    assert [asked[0], asked[2], asked[4]] == [asked[1], asked[3], asked[5]]
    theirs = [each.messages for each in (*asked[1], *asked[3], *asked[4])]
    assert sorted(map(str, heard)) == sorted(map(str, theirs))
    assert all(step.finished == step.sent and step.idle_share is not None for step in steps)
    assert found.run.facts["peer"] == {"library": "one", "slots": 3}
    assert left == ["peer"]


def _noted(asked: list[list[Any]]) -> Any:
    """`play`, and which chats it was asked to send."""

    async def noted(address: str, model: str, arrivals: list[Arrival], until_s: float) -> list[Outcome]:
        asked.append(arrivals)
        return await play(address, model, arrivals, until_s)

    return noted


@pytest.mark.usefixtures("on_shared_server", "leave_nothing")
def test_a_signal_leaves_what_was_measured(tiny: dict[str, Any], measure: Callable[..., Any]) -> None:
    def interrupt(work: str) -> None:
        if work == "kakeya, 4 chats/s, system prompt: none":
            os.kill(os.getpid(), signal.SIGINT)

    bench = Load(**tiny, **{**SMALL, "seconds": 0.5}, rates="2,4,60", system=load.SystemPrompt.NONE)
    found = measure(bench, interrupt)
    assert [step.rate for step in found.results.steps] == [2.0]
    assert found.results.abort_reason == "SIGINT"


@pytest.mark.usefixtures("on_shared_server")
def test_a_server_that_answers_nobody_ends_the_run(
    tiny: dict[str, Any], measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody(*_: object) -> list[Outcome]:
        return [Outcome(failure="answered 500")]

    monkeypatch.setattr(arrivals, "play", nobody)
    with pytest.raises(RemoteError, match="kakeya answered no chat: answered 500"):
        measure(Load(**tiny, **SMALL))


def test_a_model_that_the_peer_cannot_read_is_refused(
    tiny: dict[str, Any], measure: Callable[..., Any]
) -> None:
    with pytest.raises(ConfigError, match=r"one \.gguf file.*; leave out --peers"):
        measure(Load(**tiny, peers=True), model_path=Path(tiny["model"]))

"""`bench conversation`: who talks when, what is recorded, how it ends, and what a signal leaves."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import psutil
import pytest

import kakeya
from kakeya.bench import conversation
from kakeya.bench.benchmark import Run
from kakeya.bench.conversation import HTTP_CAPACITY, WARM_UP, Conversation, Conversing, Seat
from kakeya.bench.page import report_page
from kakeya.bench.processes import ServerProcess
from kakeya.bench.report import Report
from kakeya.bench.runner import settings
from kakeya.bench.tables import Chart, Table
from kakeya.bench.talk import CHAT, GRPC, LLAMA, RESPONSES, TRANSFORMERS, UNMATCHED, ConversationResults, Turn
from kakeya.bench.ways import GrpcWay, Refused
from kakeya.errors import ConfigError, PeerFailed, RemoteError
from support.fakes import scripted_http, sse
from support.serving import close_sessions
from support.untraced import KAKEYA

Bench = Callable[..., Conversation]
Measure = Callable[..., Any]
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4
SHORT = {"max_tokens": 3, "message_tokens": 5}


@pytest.fixture(autouse=True)
def quickly(tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(conversation, "PAUSE_AFTER_ERROR_S", 0.02)
    yield
    close_sessions(tiny_server.address)


@pytest.fixture
def bench(tiny_server: ServerProcess) -> Bench:
    """One of a session on the shared server."""

    def made(**changes: Any) -> Conversation:
        return Conversation(**({"grpc_address": tiny_server.address, **SHORT} | changes))

    return made


def at_turn(number: int, do: Callable[..., object], *arguments: Any) -> Callable[[str], None]:
    """For `measure`: do it before the turn of that number, from 1."""
    return lambda work: work.startswith(f"turn {number},") and do(*arguments)


def page_of(results: ConversationResults) -> str:
    report = Report("conversation", {}, {"cpu": "any", "os": "any"})
    return report_page("t", report, Conversation.show(results))


def test_every_turn_is_recorded(bench: Bench, tiny_server: ServerProcess, measure: Measure) -> None:
    measured = measure(bench(turns=12, server_pid=tiny_server.pid))
    (talk,) = measured.results.ways
    ends = [8 * n for n in range(1, 13)]
    assert [turn.turn for turn in talk.turns] == list(range(1, 13))
    assert [turn.history_tokens for turn in talk.turns] == ends
    assert [turn.kv_live_bytes for turn in talk.turns] == [min(end - 1, 32) * BYTES_PER_TOKEN for end in ends]
    assert [turn.dropped_tokens for turn in talk.turns] == [max(0, end - 32) for end in ends]
    starts = [turn.t_relative_s for turn in talk.turns]
    assert starts == sorted(starts)
    for turn in talk.turns:
        assert (turn.ok, turn.computed_tokens, turn.answer_tokens) == (True, 5, 3)
        assert 0 < turn.ttft_s <= turn.latency_s < 5
        assert turn.server_rss_bytes > 2**24
    assert (measured.results.ended_by, measured.results.abort_reason) == ("turns", None)
    assert talk.sessions_opened == 1
    assert measured.gates["grpc: kv_bounded"].passed is True
    assert 0 <= measured.results.bystanders_share <= 1
    assert measured.run.facts["server"]["window"] == 30
    assert measured.shares[-1] == 1.0
    assert [len(partial.ways[0].turns) for partial in measured.checkpoints] == list(range(1, 13))
    assert "not yet" in page_of(measured.checkpoints[2])
    with kakeya.Client(tiny_server.address) as client:
        assert client.list_sessions() == []
    shown = Conversation.show(measured.results)
    charts = [each for each in shown if isinstance(each, Chart)]
    titles = ["Latency per turn", "Prompt tokens computed per turn", "Latency over history"]
    assert [chart.title for chart in charts] == [*titles, "KV memory", "Server memory"]
    assert [chart.title for chart in charts if chart.picture] == ["Latency over history"]
    assert charts[0].series[0].values == [turn.latency_s for turn in talk.turns]
    assert [each.title for each in shown if isinstance(each, Table)] == [
        "Latency, medians of the first and last 20 turns",
        *("The whole conversation", "The run", "By 10 minutes", "Who took part"),
    ]


def test_a_server_whose_process_is_unknown_makes_nobody_a_bystander(bench: Bench, measure: Measure) -> None:
    measured = measure(bench(turns=10), checkpoint_every_s=600.0)
    assert measured.results.bystanders_share is None
    assert measured.gates["grpc: prefill_bounded"].passed is not None
    assert measured.checkpoints == []
    assert "30.0%" in page_of(replace(measured.results, bystanders_share=0.3))


def test_seeds_choose_messages(bench: Bench, measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    async def say(self: GrpcWay, text: str) -> Turn:
        said.append(text)
        return Turn(latency_s=0.1, prompt_tokens=1, answer_tokens=1)

    monkeypatch.setattr(GrpcWay, "say", say)
    for seed in (1, 1, 2):
        measure(bench(turns=3, message_tokens=40, seed=seed))
    assert said[0] == said[4] == said[8] == WARM_UP
    assert said[1:4] == said[5:8] != said[9:]
    assert said[1] != said[2]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run(bench: Bench, measure: Measure, number: signal.Signals) -> None:
    before, began = signal.getsignal(number), time.monotonic()
    measured = measure(bench(duration_s=60), at_turn(4, os.kill, os.getpid(), number))
    assert time.monotonic() - began < 10
    assert (measured.results.abort_reason, measured.results.ended_by) == (number.name, None)
    assert 3 <= len(measured.results.ways[0].turns) <= 4
    assert f"aborted: {number.name}" in page_of(measured.results)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"duration_s": 0}, "duration-s must be above 0"),
        ({"turns": -1}, "turns must be above 0"),
        ({"target_history_tokens": 0}, "target-history-tokens must be above 0"),
        ({"partial_checkpoint_every_s": 0}, "partial-checkpoint-every-s must be above 0"),
        ({"max_tokens": 0}, "max-tokens must be at least 1"),
        ({"message_tokens": 0}, "message-tokens must be at least 1"),
        ({"transformers_turns": 0}, "transformers-turns must be at least 1"),
        ({"turn_spacing_s": -0.1}, "turn-spacing-s must be at least 0"),
        ({"llama_context": -1}, "llama-context must be at least 0"),
        ({"ways": "grpc,telepathy"}, "ways must be some of grpc, responses, .*, got 'grpc,telepathy'"),
        ({"ways": "grpc,grpc"}, "each once"),
        ({"ways": "llama"}, "one of our own ways"),
        ({"ways": "grpc,chat"}, "grpc-address is for the way grpc alone"),
        ({"server_pid": 2**22 + 1}, "server-pid must be a running process"),
    ],
)
def test_bad_settings_are_named(bench: Bench, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(**changes).check(picture=False)


def test_what_its_settings_say(bench: Bench, chat_model: Path, tmp_path: Path) -> None:
    assert bench().ends() == {"duration": 1800.0}
    assert bench(turns=5, target_history_tokens=7).ends() == {"turns": 5, "target history": 7}
    assert bench().checkpoint_every_s == 600.0
    assert bench().model_to_fetch is None
    wanted = Conversation(model=str(chat_model), ways="chat,llama")
    assert wanted.model_to_fetch == str(chat_model)
    with pytest.raises(ConfigError, match=r"llama.cpp needs a model in one \.gguf file"):
        wanted.run(Run(model_path=chat_model))
    with pytest.raises(ConfigError, match="transformers needs the model's file"):
        Conversation(ways="chat,transformers").run(Run(model_path=Path("absent")))
    told = settings(bench(api_key="secret", server_pid=os.getpid(), llama_server=tmp_path / "llama-server"))
    assert not {"api_key", "server_pid"} & told.keys()
    assert told["llama_server"] == "llama-server"
    absent = {f"proposer_tls_{name}": str(tmp_path / f"{name}.pem") for name in ("cert", "key")}
    told = settings(bench(proposer_api_key="secret", proposer_tls_ca="system", **absent))
    assert "secret" not in told.values()
    assert [told[f"proposer_tls_{name}"] for name in ("ca", "cert", "key")] == [
        "system",
        "cert.pem",
        "key.pem",
    ]


HEARD: list[tuple[str, str]] = []


class Fake:
    """Answers after a while; `trouble` says at which of its turns it raises what."""

    def __init__(self, name: str, trouble: dict[int, Exception] | None = None, seconds: float = 0.0) -> None:
        self.name, self.trouble, self.seconds = name, trouble or {}, seconds
        self.turns = 0

    async def say(self, text: str) -> Turn:
        HEARD.append((self.name, text))
        self.turns += 1
        await asyncio.sleep(self.seconds)
        if self.turns in self.trouble:
            raise self.trouble[self.turns]
        return Turn(latency_s=0.1, prompt_tokens=10 * self.turns, answer_tokens=2)

    async def forget(self) -> None:
        self.turns = 0


def held(*fakes: Fake, most: dict[str, int] | None = None, run: Any = None, **ends: float) -> Any:
    """A conversation with these, warmed up first."""

    async def story() -> ConversationResults:
        numbers = iter(range(1, 1000))
        seats = [Seat(fake, 100, {}, most_turns=(most or {}).get(fake.name)) for fake in fakes]
        talk = Conversing(Conversation(**ends), run or Run(), seats, lambda: f"m{next(numbers)}")
        await talk.warm_up()
        return await talk.hold()

    HEARD.clear()
    return asyncio.run(story())


def test_everybody_has_a_turn_before_the_next_begins_and_nobody_always_comes_first() -> None:
    results = held(*map(Fake, "abc"), turns=3)
    assert [text for _, text in HEARD] == [text for text in (WARM_UP, "m1", "m2", "m3") for _ in range(3)]
    assert "".join(name for name, _ in HEARD) == "abcbcacababc"
    assert [[turn.turn for turn in talk.turns] for talk in results.ways] == [[1, 2, 3]] * 3
    assert results.ways[0].turns[0].prompt_tokens == 10  # the warm-up is forgotten


def test_an_error_is_recorded_and_a_refusal_ends_it() -> None:
    rude = Fake("rude", {2: Refused("context is full")})
    weak = Fake("weak", {2: RemoteError("lost"), 4: PeerFailed("died")})
    results = held(rude, weak, turns=4)
    first, second = results.ways
    assert [(turn.error_str, turn.stopped) for turn in first.turns] == [
        (None, False),
        ("context is full", True),
    ]
    assert [turn.error_class for turn in second.turns] == [None, "RemoteError", None, "PeerFailed"]
    assert "<td>PeerFailed: died</td>" in page_of(results)
    assert ">stopped at turn 2</td>" in page_of(results)


@pytest.mark.parametrize(
    ("ends", "by", "counts"),
    [
        ({"turns": 2}, "turns", [2, 2]),
        ({"turns": 9, "target_history_tokens": 30}, "target history", [3, 3]),
        ({"turns": 9, "duration_s": 1e-9}, "duration", [0, 0]),
        ({"turns": 9, "most": {"a": 2, "b": 3}}, "nobody left", [2, 3]),
    ],
)
def test_the_nearest_end_ends_it(ends: dict[str, Any], by: str, counts: list[int]) -> None:
    results = held(Fake("a"), Fake("b"), **ends)
    assert (results.ended_by, [len(talk.turns) for talk in results.ways]) == (by, counts)
    # Errors do not shorten the history.
    assert held(Fake("a", {3: RemoteError("lost")}), turns=3, target_history_tokens=23).ended_by == "turns"


@pytest.mark.parametrize(("spacing", "least", "most"), [(0.3, 0.29, 0.55), (0.05, 0.19, 0.45)])
def test_spacing_is_between_starts_and_an_overrun_starts_at_once(
    spacing: float, least: float, most: float
) -> None:
    (talk,) = held(Fake("a", seconds=0.2), turns=4, turn_spacing_s=spacing).ways
    gaps = sorted(later.t_relative_s - earlier.t_relative_s for earlier, later in pairwise(talk.turns))
    assert least < gaps[0] <= gaps[1] < most


def test_an_end_asked_for_in_the_middle_does_not_wait_and_keeps_what_there_is() -> None:
    run: Run[ConversationResults] = Run()

    class Asking(Fake):
        async def say(self, text: str) -> Turn:
            if text == "m2":
                run.interruption.ask("SIGINT")
                await asyncio.sleep(30)
            return await super().say(text)

    began = time.monotonic()
    results = held(Fake("a"), Asking("b"), run=run, turns=5)
    assert time.monotonic() - began < 10
    assert results.ended_by is None
    assert [len(each.turns) for each in results.ways] == [2, 1]


def test_all_our_ways_hold_the_same_conversation(
    tiny: dict[str, Any], on_shared_server: list[Any], measure: Measure
) -> None:
    ways = [RESPONSES, CHAT, UNMATCHED, GRPC]
    measured = measure(Conversation(**tiny, **SHORT, ways=",".join(ways), turns=3))
    assert on_shared_server == [(HTTP_CAPACITY, True), (HTTP_CAPACITY, "--no-chat-matching", True)]
    talks = measured.results.by_name()
    assert list(talks) == ways
    assert all([turn.ok for turn in talk.turns] == [True] * 3 for talk in talks.values())
    lengths = [[turn.prompt_tokens for turn in talks[way].turns] for way in ways[:3]]
    assert lengths[0] == lengths[1] == lengths[2]
    first, second, third = (turn.cached_tokens for turn in talks[RESPONSES].turns)
    assert third > second > first == 0
    assert measured.results.unmatched_over_matched.keys() == {"head", "tail", "ttft_p50_s", "latency_p50_s"}
    assert measured.run.facts["server"]["model_id"] == Path(tiny["model"]).name
    assert [talk.software["flags"] for talk in talks.values()] == [
        "none",
        "none",
        "--no-chat-matching",
        "none",
    ]
    charts = [each for each in Conversation.show(measured.results) if isinstance(each, Chart)]
    assert [chart.title for chart in charts if chart.picture] == ["Latency per turn"]


@pytest.mark.parametrize(("way", "asked"), [(UNMATCHED, (8, "--no-chat-matching", True)), (GRPC, (1, False))])
def test_one_way_needs_one_server(
    tiny: dict[str, Any], on_shared_server: list[Any], measure: Measure, way: str, asked: tuple[Any, ...]
) -> None:
    measured = measure(Conversation(**tiny, **SHORT, ways=way, turns=1))
    assert on_shared_server == [asked]
    assert measured.results.ways[0].n_turns == 1


@pytest.mark.usefixtures("on_shared_server")
def test_peers_take_part_where_they_are_wanted(
    tiny: dict[str, Any], measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Peer:
        pid = server_pid = os.getpid()
        facts: ClassVar = {"library": "one"}

        def __init__(self, path: str, threads: int, program: str | None, context: int) -> None:
            assert (path, threads, program, context) == (tiny["model"], 1, "x", 0)
            self.address = address

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            closed.append(type(self).__name__)

    class Slow(Fake, Peer):
        def __init__(self, path: str, threads: int, max_tokens: int) -> None:
            super().__init__(TRANSFORMERS)

    answer = sse([{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}}])
    monkeypatch.setattr(conversation, "LlamaServer", Peer)
    monkeypatch.setattr(conversation, "TransformersWay", Slow)
    monkeypatch.setattr(conversation, "require_llama_server", lambda path, program: None)
    wanted = {"ways": "responses,llama,transformers", "llama_server": Path("x"), "transformers_turns": 1}
    with scripted_http(lambda path, body: (200, answer)) as address:
        bench = Conversation(**tiny, **SHORT, **wanted, turns=2)
        measured = measure(bench, model_path=Path(tiny["model"]))
    talks = measured.results.by_name()
    assert {name: each.n_turns for name, each in talks.items()} == {RESPONSES: 2, LLAMA: 2, TRANSFORMERS: 1}
    assert talks[LLAMA].software == {"library": "one"}
    assert measured.results.times_ours.keys() == talks.keys()
    assert closed == ["Slow", "Peer"]


def test_a_killed_bench_leaves_its_report_and_no_server(chat_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "s.json"
    flags = ("--model", str(chat_model), "--duration-s", "60", "--max-tokens", "2", "--message-tokens", "4")
    quick = ("--partial-checkpoint-every-s", "0.1", "--threads", "1", "--output", str(output))
    command = [sys.executable, "-c", KAKEYA, "bench", "conversation"]
    merged = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*command, *flags, *quick], **merged) as process:
        while not output.exists() and process.poll() is None:
            time.sleep(0.05)
        children = psutil.Process(process.pid).children()
        assert json.loads(output.read_text())["partial"] is True
        process.terminate()
        said, _ = process.communicate(timeout=30)
    report = json.loads(output.read_text())
    assert (report["partial"], report["results"]["abort_reason"]) == (False, "SIGTERM")
    assert report["config"]["model"] == chat_model.name
    assert process.returncode == int(any(gate["passed"] is False for gate in report["gates"])), said
    assert "aborted: SIGTERM" in said
    assert children
    assert not any(child.is_running() for child in children)

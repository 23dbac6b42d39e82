"""`bench conversation`: who talks when, what is recorded, how it ends, and what a signal leaves."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

import kakeya
from kakeya.bench import conversation
from kakeya.bench.benchmark import Run
from kakeya.bench.conversation import WARM_UP, Conversation, Conversing, Seat
from kakeya.bench.page import report_page
from kakeya.bench.processes import Bystanders, ServerProcess
from kakeya.bench.report import Report
from kakeya.bench.runner import main_chart, settings
from kakeya.bench.tables import Chart, Table
from kakeya.bench.talk import CHAT, GRPC, LLAMA, RESPONSES, TRANSFORMERS, UNMATCHED, ConversationResults, Turn
from kakeya.bench.text import Messages
from kakeya.bench.ways import Refused
from kakeya.client import AsyncClient
from kakeya.errors import ConfigError, PeerFailed, RemoteError
from support.leftovers import close_sessions
from support.scripted_http import scripted_http, sse

Bench = Callable[..., Conversation]
CAPACITY = 32
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4


@pytest.fixture(autouse=True)
def leave_nothing(tiny_server: ServerProcess) -> Iterator[None]:
    yield
    close_sessions(tiny_server.address)


@pytest.fixture
def bench(tiny_server: ServerProcess) -> Bench:
    """One of a session on the shared server."""

    def made(**changes: Any) -> Conversation:
        given = {"grpc_address": tiny_server.address, "max_tokens": 3, "message_tokens": 5}
        return Conversation(**(given | changes))

    return made


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "PAUSE_AFTER_ERROR_S", 0.02)


def at_turn(number: int, do: Callable[[], object]) -> Callable[[str], None]:
    """For `measure`: do it before the turn of that number, from 1."""
    return lambda work: do() if work.startswith(f"turn {number},") else None


def only(measured: Any) -> Any:
    (talk,) = measured.results.ways
    return talk


def test_every_turn_of_a_session_is_recorded(
    bench: Bench, tiny_server: ServerProcess, measure: Callable[..., Any]
) -> None:
    measured = measure(bench(turns=12, server_pid=tiny_server.pid))
    talk = only(measured)
    assert [turn.turn for turn in talk.turns] == list(range(1, 13))
    assert [turn.history_tokens for turn in talk.turns] == [8 * n for n in range(1, 13)]
    assert [turn.computed_tokens for turn in talk.turns] == [5] * 12
    kept = [min(8 * n - 1, CAPACITY) * BYTES_PER_TOKEN for n in range(1, 13)]
    assert [turn.kv_live_bytes for turn in talk.turns] == kept
    assert [turn.dropped_tokens for turn in talk.turns] == [max(0, 8 * n - CAPACITY) for n in range(1, 13)]
    assert all(turn.ok and turn.answer_tokens == 3 for turn in talk.turns)
    assert all(0 < turn.ttft_s <= turn.latency_s < 5 for turn in talk.turns)
    assert all(turn.server_rss_bytes > 2**24 for turn in talk.turns)
    starts = [turn.t_relative_s for turn in talk.turns]
    assert starts == sorted(starts)
    assert (measured.results.ended_by, measured.results.abort_reason) == ("turns", None)
    assert talk.sessions_opened == 1
    assert measured.gates["grpc: kv_bounded"].passed is True
    assert 0 <= measured.results.bystanders_share <= 1
    assert measured.run.facts["server"]["window"] == 30
    assert measured.shares[-1] == 1.0
    with kakeya.Client(tiny_server.address) as client:
        assert client.list_sessions() == []


def test_the_run_ends_at_the_target_history(bench: Bench, measure: Callable[..., Any]) -> None:
    measured = measure(bench(target_history_tokens=50, message_tokens=9, turns=100))
    assert measured.results.ended_by == "target history"
    assert [turn.history_tokens for turn in only(measured).turns[-2:]] == [48, 60]


def test_the_run_ends_with_its_time(bench: Bench, measure: Callable[..., Any]) -> None:
    results = measure(bench(duration_s=0.3)).results
    assert results.ended_by == "duration"
    assert 0.3 <= results.duration_s < 3


@pytest.mark.parametrize(("spacing", "least", "most"), [(0.5, 0.49, 0.85), (0.35, 0.39, 0.7)])
def test_spacing_is_between_starts_and_an_overrun_starts_at_once(
    bench: Bench,
    measure: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    spacing: float,
    least: float,
    most: float,
) -> None:
    encoded = Messages.encoded

    def slow(self: Messages, text: str) -> list[int]:
        time.sleep(0.2)  # once for the text, once for the tokens
        return encoded(self, text)

    monkeypatch.setattr(Messages, "encoded", slow)
    turns = only(measure(bench(turns=4, turn_spacing_s=spacing))).turns
    gaps = sorted(later.t_relative_s - earlier.t_relative_s for earlier, later in pairwise(turns))
    assert gaps[0] > least
    assert gaps[1] < most


def test_messages_follow_from_the_seed(
    bench: Bench, measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(conversation.GrpcWay, "_say", _noted(said))
    for seed in (1, 1, 2):
        measure(bench(turns=3, message_tokens=40, seed=seed))
    assert said[1:4] == said[5:8] != said[9:]
    assert said[0] == WARM_UP
    assert said[1] != said[2]


def _noted(said: list[str]) -> Any:
    async def say(self: object, text: str) -> Turn:
        said.append(text)
        return Turn(latency_s=0.1, prompt_tokens=1, answer_tokens=1)

    return say


@pytest.mark.usefixtures("no_pause")
def test_a_lost_session_is_an_error_and_the_run_goes_on(
    bench: Bench, tiny_server: ServerProcess, measure: Callable[..., Any]
) -> None:
    measured = measure(bench(turns=5), at_turn(3, lambda: close_sessions_sync(tiny_server)))
    talk = only(measured)
    assert [turn.ok for turn in talk.turns] == [True, True, False, True, True]
    assert (talk.turns[2].error_class, talk.sessions_opened, talk.n_errors) == ("SessionNotFound", 2, 1)
    assert talk.turns[2].error_str
    assert measured.gates["grpc: errors"].passed is False
    assert "SessionNotFound" in page_of(measured.results)


def close_sessions_sync(server: ServerProcess) -> None:
    """Take every session away from whoever uses it."""
    with kakeya.Client(server.address) as client:
        for each in client.list_sessions():
            client.session(each.session_id).close()


def page_of(results: ConversationResults) -> str:
    report = Report("conversation", {}, {"cpu": "any", "os": "any"})
    return report_page("t", report, Conversation.show(results))


@pytest.mark.usefixtures("no_pause")
def test_an_error_that_leaves_the_session_goes_on_in_it(
    bench: Bench, measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded, calls = Messages.encoded, 0

    def one_bad(self: Messages, text: str) -> list[int]:
        nonlocal calls
        calls += 1
        return [10**6] if calls == 5 else encoded(self, text)

    monkeypatch.setattr(Messages, "encoded", one_bad)
    talk = only(measure(bench(turns=3)))
    assert [turn.error_class for turn in talk.turns] == [None, "InvalidArgument", None]
    assert talk.turns[2].history_tokens == 16
    assert talk.sessions_opened == 1


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("closed_at", [3, 4])
def test_a_session_lost_at_the_very_end_is_no_trouble(
    bench: Bench, tiny_server: ServerProcess, measure: Callable[..., Any], closed_at: int
) -> None:
    measured = measure(bench(turns=3), at_turn(closed_at, lambda: close_sessions_sync(tiny_server)))
    assert only(measured).n_turns == closed_at - 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_whole_results(
    bench: Bench, measure: Callable[..., Any], number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    began = time.monotonic()
    measured = measure(bench(duration_s=60), at_turn(4, lambda: os.kill(os.getpid(), number)))
    assert time.monotonic() - began < 10
    assert (measured.results.abort_reason, measured.results.ended_by) == (number.name, None)
    assert 3 <= len(only(measured).turns) <= 4
    assert f"aborted: {number.name}" in page_of(measured.results)
    assert signal.getsignal(number) is before


def test_a_signal_does_not_wait_for_the_turn(bench: Bench, measure: Callable[..., Any]) -> None:
    def interrupt() -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    began = time.monotonic()
    slow = bench(turns=1, max_tokens=10_000_000)
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(conversation.Conversing, "warm_up", _nothing)
    try:
        measured = measure(slow, at_turn(1, interrupt))
    finally:
        monkeypatch.undo()
    assert time.monotonic() - began < 10
    assert only(measured).turns == []
    assert measured.results.abort_reason == "SIGINT"
    assert [gate.passed for gate in measured.gates.values()] == [None] * 4


async def _nothing(self: object) -> None:
    pass


def test_checkpoints_are_complete_in_themselves_and_not_too_many(
    bench: Bench, measure: Callable[..., Any]
) -> None:
    often = measure(bench(turns=6))
    assert [len(partial.ways[0].turns) for partial in often.checkpoints] == [1, 2, 3, 4, 5, 6]
    assert "not yet" in page_of(often.checkpoints[2])
    assert measure(bench(turns=6), checkpoint_every_s=600.0).checkpoints == []
    assert bench().checkpoint_every_s == 600.0


def test_the_page_shows_every_plot(
    bench: Bench, tiny_server: ServerProcess, measure: Callable[..., Any]
) -> None:
    results = measure(bench(turns=11, server_pid=tiny_server.pid)).results
    shown = Conversation.show(results)
    charts = [each for each in shown if isinstance(each, Chart)]
    assert [chart.title for chart in charts] == [
        "Latency per turn",
        "Prompt tokens computed per turn",
        "Latency over history",
        "KV memory",
        "Server memory",
    ]
    assert [chart.title for chart in charts if chart.picture] == ["Latency over history"]
    assert charts[0].series[0].values == [turn.latency_s for turn in results.ways[0].turns]
    assert [each.title for each in shown if isinstance(each, Table)] == [
        "Latency, medians of the first and last 20 turns",
        "The whole conversation",
        "The run",
        "By 10 minutes",
        "Who took part",
    ]


def test_others_are_told_from_the_server_only_when_its_process_is_known(
    bench: Bench, tiny_server: ServerProcess, measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bystanders, "share", lambda self: 0.3)
    known, unknown = (measure(bench(turns=10, server_pid=pid)) for pid in (tiny_server.pid, None))
    assert [each.results.bystanders_share for each in (known, unknown)] == [0.3, None]
    assert known.gates["grpc: prefill_bounded"].passed is None
    assert known.gates["grpc: prefill_bounded"].reason.startswith("others used 30% of the machine")
    assert unknown.gates["grpc: prefill_bounded"].passed is not None
    assert "30.0%" in page_of(known.results)


def test_without_an_end_it_lasts_half_an_hour(bench: Bench) -> None:
    assert bench().ends() == {"duration": 1800.0}
    assert bench(turns=5, target_history_tokens=7).ends() == {"turns": 5, "target history": 7}


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
        ({"turn_spacing_s": -0.1}, "turn-spacing-s must not be negative"),
        ({"llama_context": -1}, "llama-context must not be negative"),
        ({"ways": "grpc,telepathy"}, "ways must be some of grpc, responses, .*, got 'grpc,telepathy'"),
        ({"ways": "grpc,grpc"}, "each once"),
        ({"ways": "llama"}, "one of our own ways"),
        ({"ways": "grpc,chat"}, "grpc-address is for the way grpc alone"),
    ],
)
def test_bad_settings_are_named(bench: Bench, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(**changes)


def test_what_cannot_be_is_refused_in_time(bench: Bench, chat_model: Path) -> None:
    with pytest.raises(ConfigError, match="server-pid must be a running process"):
        bench(server_pid=2**22 + 1).check(picture=False)
    assert bench().model_to_fetch is None
    wanted = Conversation(model=str(chat_model), ways="chat,llama")
    assert wanted.model_to_fetch == str(chat_model)
    with pytest.raises(ConfigError, match=r"llama.cpp needs a model in one \.gguf file"):
        wanted.run(Run(model_path=chat_model))
    with pytest.raises(ConfigError, match="transformers needs the model's file"):
        Conversation(ways="chat,transformers").run(Run(model_path=Path("absent")))


def test_reports_tell_no_secret_and_no_directory(bench: Bench, tmp_path: Path) -> None:
    told = settings(bench(api_key="secret", server_pid=os.getpid(), llama_server=tmp_path / "llama-server"))
    assert not {"api_key", "server_pid"} & told.keys()
    assert told["llama_server"] == "llama-server"
    assert json.dumps(told)


class Fake:
    """Answers at once; `trouble` says at which of its turns it raises what."""

    def __init__(self, name: str, heard: list[tuple[str, str]], **trouble: Exception) -> None:
        self.name = name
        self._heard = heard
        self._trouble = {int(turn.removeprefix("at")): error for turn, error in trouble.items()}
        self._turns = 0

    async def say(self, text: str) -> Turn:
        self._heard.append((self.name, text))
        self._turns += 1
        if self._turns in self._trouble:
            raise self._trouble[self._turns]
        return Turn(latency_s=0.1, prompt_tokens=10 * self._turns, answer_tokens=2)

    async def forget(self) -> None:
        self._turns = 0


def conversing(*fakes: Fake, most: dict[str, int] | None = None, **ends: float) -> Conversing:
    numbers = iter(range(1, 1000))
    seats = [Seat(fake, 100, {}, most_turns=(most or {}).get(fake.name)) for fake in fakes]
    return Conversing(Conversation(**ends), Run(), seats, lambda: f"m{next(numbers)}")


def held(*fakes: Fake, most: dict[str, int] | None = None, **ends: float) -> ConversationResults:
    async def story() -> ConversationResults:
        return await conversing(*fakes, most=most, **ends).hold()

    return asyncio.run(story())


def test_everybody_has_a_turn_before_the_next_begins_and_nobody_always_comes_first() -> None:
    heard: list[tuple[str, str]] = []
    results = held(*(Fake(name, heard) for name in "abc"), turns=3)
    assert [text for _, text in heard] == [text for text in ("m1", "m2", "m3") for _ in range(3)]
    order = ["".join(name for name, _ in heard[start : start + 3]) for start in (0, 3, 6)]
    assert order == ["bca", "cab", "abc"]
    assert [[turn.turn for turn in talk.turns] for talk in results.ways] == [[1, 2, 3]] * 3
    assert results.ended_by == "turns"


@pytest.mark.usefixtures("no_pause")
def test_an_error_is_recorded_and_a_refusal_ends_it() -> None:
    rude = Fake("rude", [], at2=Refused("context is full"))
    weak = Fake("weak", [], at1=RemoteError("lost"), at3=PeerFailed("died"))
    first, second = held(rude, weak, turns=4).ways
    assert [(turn.error_str, turn.stopped) for turn in first.turns] == [
        (None, False),
        ("context is full", True),
    ]
    assert [turn.error_class for turn in second.turns] == ["RemoteError", None, "PeerFailed", None]


def test_who_has_had_enough_leaves_and_the_last_one_ends_it() -> None:
    results = held(Fake("a", []), Fake("b", []), most={"a": 2, "b": 3}, turns=10)
    assert [len(talk.turns) for talk in results.ways] == [2, 3]
    assert results.ended_by == "nobody left"


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize(
    ("ends", "by", "count"),
    [
        ({"turns": 2}, "turns", 2),
        ({"turns": 9, "target_history_tokens": 30}, "target history", 3),
        ({"turns": 9, "duration_s": 1e-9}, "duration", 0),
    ],
)
def test_the_nearest_end_ends_it(ends: dict[str, float], by: str, count: int) -> None:
    results = held(Fake("a", []), **ends)
    assert (results.ended_by, len(results.ways[0].turns)) == (by, count)
    # Errors do not shorten the history.
    failing = held(Fake("a", [], at3=RemoteError("lost")), turns=3, target_history_tokens=23)
    assert failing.ended_by == "turns"


def test_the_warm_up_is_forgotten() -> None:
    heard: list[tuple[str, str]] = []

    async def story() -> ConversationResults:
        talk = conversing(Fake("a", heard), Fake("b", heard), turns=1)
        await talk.warm_up()
        return await talk.hold()

    results = asyncio.run(story())
    assert heard == [("a", WARM_UP), ("b", WARM_UP), ("b", "m1"), ("a", "m1")]
    assert results.ways[0].turns[0].prompt_tokens == 10


def test_an_end_asked_for_in_the_middle_keeps_what_there_is() -> None:
    class Asking(Fake):
        async def say(self, text: str) -> Turn:
            if text == "m2":
                talk.run.interruption.ask("SIGINT")
                await asyncio.sleep(30)
            return await super().say(text)

    talk = conversing(Fake("a", []), Asking("b", []), turns=5)
    results = asyncio.run(talk.hold())
    assert results.ended_by is None
    assert [len(each.turns) for each in results.ways] == [2, 1]


@pytest.fixture
def started(tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Benches get the shared server; which flags they asked for is told."""
    flags: list[tuple[str, ...]] = []

    @asynccontextmanager
    async def shared(engine: Any, capacity: int, extra: Any = (), *, http: bool) -> AsyncIterator[Any]:
        assert http
        assert capacity == conversation.HTTP_CAPACITY
        flags.append(tuple(extra))
        async with AsyncClient(tiny_server.address) as client:
            yield tiny_server, await client.server_info()

    monkeypatch.setattr(conversation, "server_process", shared)
    return flags


def test_all_our_ways_hold_the_same_conversation(
    tiny: dict[str, Any], started: list[tuple[str, ...]], measure: Callable[..., Any]
) -> None:
    ways = [RESPONSES, CHAT, UNMATCHED, GRPC]
    measured = measure(Conversation(**tiny, ways=",".join(ways), turns=3, max_tokens=3, message_tokens=5))
    assert started == [(), ("--no-chat-matching",)]
    talks = measured.results.by_name()
    assert list(talks) == ways
    assert all([turn.ok for turn in talk.turns] == [True] * 3 for talk in talks.values())
    lengths = [[turn.prompt_tokens for turn in talks[way].turns] for way in ways[:3]]
    assert lengths[0] == lengths[1] == lengths[2]
    first, second, third = (turn.cached_tokens for turn in talks[RESPONSES].turns)
    assert third > second > first == 0
    assert len(measured.checkpoints) == 3
    assert measured.results.unmatched_over_matched.keys() == {"head", "tail", "ttft_p50_s", "latency_p50_s"}
    assert measured.run.facts["server"]["model_id"] == Path(tiny["model"]).name
    assert talks[UNMATCHED].software["flags"] == "--no-chat-matching"
    chart = main_chart(Conversation.show(measured.results))
    assert chart is not None
    assert chart.title == "Latency per turn"


def test_only_the_unmatched_way_needs_one_server(
    tiny: dict[str, Any], started: list[tuple[str, ...]], measure: Callable[..., Any]
) -> None:
    measured = measure(Conversation(**tiny, ways=UNMATCHED, turns=1, max_tokens=3, message_tokens=5))
    assert started == [("--no-chat-matching",)]
    assert only(measured).n_turns == 1


@pytest.mark.usefixtures("started")
def test_peers_take_part_where_they_are_wanted(
    tiny: dict[str, Any], measure: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
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
            super().__init__(TRANSFORMERS, [])

    def answer(path: str, body: Any) -> tuple[int, str]:
        usage = {"prompt_tokens": 9, "completion_tokens": 2}
        return 200, sse([{"choices": [{"delta": {"content": "so"}}]}, {"choices": [], "usage": usage}])

    monkeypatch.setattr(conversation, "LlamaServer", Peer)
    monkeypatch.setattr(conversation, "TransformersWay", Slow)
    monkeypatch.setattr(conversation, "require_llama_server", lambda path, program: None)
    wanted = {"ways": "responses,llama,transformers", "llama_server": Path("x"), "transformers_turns": 1}
    talk = {"turns": 2, "max_tokens": 3, "message_tokens": 5}
    with scripted_http(answer) as address:
        bench = Conversation(**tiny, **wanted, **talk)
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
    program = "from kakeya.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "bench", "conversation", *flags, *quick],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        while not output.exists() and process.poll() is None:
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert json.loads(output.read_text())["partial"] is True
        process.terminate()
        said, _ = process.communicate(timeout=30)
    report = json.loads(output.read_text())
    assert report["partial"] is False
    assert report["results"]["abort_reason"] == "SIGTERM"
    assert report["config"]["model"] == chat_model.name
    assert process.returncode == int(any(gate["passed"] is False for gate in report["gates"])), said
    assert "aborted: SIGTERM" in said
    assert children
    assert not any(Path(f"/proc/{child}").exists() for child in children)

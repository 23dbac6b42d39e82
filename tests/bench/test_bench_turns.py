"""`bench turns` and `bench http-session`: who talks when, how it ends, and what is reported."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar, Self

import pytest

from kakeya.bench import turns
from kakeya.bench.contestants_http import Refused
from kakeya.bench.http_session import HttpSessionBench, run as run_http_session
from kakeya.bench.http_session_page import http_session_page
from kakeya.bench.interrupts import Interruption
from kakeya.bench.report import Report
from kakeya.bench.server_process import ServerProcess
from kakeya.bench.turns import TurnsBench, now_and_then, run
from kakeya.bench.turns_page import turns_page
from kakeya.bench.turns_results import LLAMA, MATCHED, RESPONSES, TRANSFORMERS, UNMATCHED, Answered
from kakeya.bench.turns_talk import WARM_UP, Ends, Talk
from kakeya.client import AsyncClient
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError, PeerFailed, RemoteError
from support.leftovers import close_sessions
from support.scripted_http import scripted_http, sse


@pytest.fixture(autouse=True)
def leave_nothing(tiny_server: ServerProcess) -> Iterator[None]:
    yield
    close_sessions(tiny_server.address)


class Fake:
    """Answers at once; `trouble` says at which of its turns it raises what."""

    def __init__(self, name: str, heard: list[tuple[str, str]], **trouble: Exception) -> None:
        self.name = name
        self._heard = heard
        self._trouble = {int(turn.removeprefix("at")): error for turn, error in trouble.items()}
        self._turns = 0

    def say(self, text: str) -> Answered:
        self._heard.append((self.name, text))
        self._turns += 1
        if self._turns in self._trouble:
            raise self._trouble[self._turns]
        return Answered(0.1, 0.05, 10 * self._turns, 2, 0)

    def forget(self) -> None:
        self._turns = 0


def counting() -> Callable[[], str]:
    numbers = iter(range(1, 1000))
    return lambda: f"m{next(numbers)}"


def quiet(done: float, work: str) -> None:
    assert 0 <= done <= 1


def held(talk: Talk, ends: Ends, after_turn: Callable[[], object] = lambda: None) -> Talk:
    asyncio.run(talk.hold(counting(), ends, quiet, after_turn))
    return talk


def talk_of(*contestants: Fake, **most_turns: int) -> Talk:
    async def made() -> Talk:
        return Talk(contestants, Interruption(), most_turns)

    return asyncio.run(made())


def test_everybody_has_a_turn_before_the_next_begins_and_nobody_always_comes_first() -> None:
    heard: list[tuple[str, str]] = []
    talk = held(talk_of(*(Fake(name, heard) for name in "abc")), Ends(turns=3))
    assert [text for _, text in heard] == [text for text in ("m1", "m2", "m3") for _ in range(3)]
    assert ["".join(name for name, _ in heard[start : start + 3]) for start in (0, 3, 6)] == [
        "bca",
        "cab",
        "abc",
    ]
    assert [[turn.number for turn in own] for own in talk.turns.values()] == [[1, 2, 3]] * 3
    assert talk.ended_by == "turns"


def test_an_error_is_recorded_and_a_refusal_ends_it() -> None:
    heard: list[tuple[str, str]] = []
    rude = Fake("rude", heard, at2=Refused("context is full"))
    weak = Fake("weak", heard, at1=RemoteError("lost"), at3=PeerFailed("died"))
    talk = held(talk_of(rude, weak), Ends(turns=4))
    assert [(turn.error_str, turn.stopped) for turn in talk.turns["rude"]] == [
        (None, False),
        ("context is full", True),
    ]
    assert [turn.error_class for turn in talk.turns["weak"]] == ["RemoteError", None, "PeerFailed", None]


def test_who_has_had_enough_leaves_and_the_last_one_ends_it() -> None:
    heard: list[tuple[str, str]] = []
    talk = held(talk_of(Fake("a", heard), Fake("b", heard), a=2, b=3), Ends(turns=10))
    assert {name: len(own) for name, own in talk.turns.items()} == {"a": 2, "b": 3}
    assert talk.ended_by == "nobody left"


@pytest.mark.parametrize(
    ("ends", "by", "count"),
    [
        (Ends(turns=2), "turns", 2),
        (Ends(turns=9, target_history_tokens=30), "target history", 3),
        (Ends(turns=9, duration_s=1e-9), "duration", 0),
    ],
)
def test_the_nearest_end_ends_it(ends: Ends, by: str, count: int) -> None:
    talk = held(talk_of(Fake("a", [])), ends)
    assert (talk.ended_by, len(talk.turns["a"])) == (by, count)


def test_errors_do_not_shorten_the_history() -> None:
    failing = Fake("a", [], at3=RemoteError("lost"))
    talk = held(talk_of(failing), Ends(turns=3, target_history_tokens=23))
    assert talk.ended_by == "turns"


@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ({}, "a talk needs an end"),
        ({"turns": 0}, "turns must be above 0"),
        ({"duration_s": -1.0}, "duration-s must be above 0"),
        ({"target_history_tokens": 0}, "target-history-tokens must be above 0"),
    ],
)
def test_ends_that_cannot_be_are_named(ends: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Ends(**ends)


def test_the_warm_up_is_forgotten() -> None:
    heard: list[tuple[str, str]] = []
    talk = talk_of(Fake("a", heard), Fake("b", heard))

    async def story() -> None:
        await talk.warm_up()
        await talk.hold(counting(), Ends(turns=1), quiet, lambda: None)

    asyncio.run(story())
    assert heard == [("a", WARM_UP), ("b", WARM_UP), ("b", "m1"), ("a", "m1")]
    assert [turn.answer.prompt_tokens for turn in talk.turns["a"] if turn.answer] == [10]


def test_an_end_asked_for_in_the_middle_keeps_what_there_is() -> None:
    async def story() -> Talk:
        interruption = Interruption()
        heard: list[tuple[str, str]] = []

        class Asking(Fake):
            def say(self, text: str) -> Answered:
                if text == "m2":
                    loop.call_soon_threadsafe(interruption.ask, "SIGINT")
                    assert released.wait(10)
                return super().say(text)

        loop = asyncio.get_running_loop()
        released = threading.Event()
        talk = Talk([Fake("a", heard), Asking("b", heard)], interruption, {})
        await talk.hold(counting(), Ends(turns=5), quiet, lambda: None)
        released.set()
        return talk

    talk = asyncio.run(story())
    assert talk.ended_by is None
    assert len(talk.turns["a"]) == 2
    assert len(talk.turns["b"]) == 1


def test_now_and_then_is_not_always(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 5.0, 5.0, 9.0, 10.0, 10.0])
    monkeypatch.setattr(turns.time, "monotonic", lambda: next(times))
    done: list[str] = []
    call = now_and_then(5.0, lambda: done.append("x"))
    for expected in (0, 1, 1, 2):
        call()
        assert len(done) == expected


@pytest.fixture
def started(tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Benches get the shared server; which flags they asked for is told."""
    flags: list[tuple[str, ...]] = []

    @asynccontextmanager
    async def shared(model: str, config: EngineConfig, extra: Any = (), *, http: bool) -> AsyncIterator[Any]:
        assert http
        assert config.capacity == turns.CAPACITY
        flags.append(tuple(extra))
        async with AsyncClient(tiny_server.address) as client:
            yield tiny_server, await client.server_info()

    monkeypatch.setattr(turns, "server_process", shared)
    return flags


def bench_of(model: Path, engine: EngineConfig, **changes: Any) -> TurnsBench:
    settings = {"llama": False, "turns": 3, "max_tokens": 3, "message_tokens": 5, "checkpoint_every_s": 1e-9}
    return TurnsBench(str(model), str(model), engine, **(settings | changes))


def test_a_run_has_all_our_ways_and_reports_them(
    chat_model: Path, tiny_engine: EngineConfig, started: list[tuple[str, ...]]
) -> None:
    checkpoints: list[Report] = []
    report = run(bench_of(chat_model, tiny_engine), quiet, checkpoints.append)
    assert started == [(), ("--no-chat-matching",)]
    rows = {row["contestant"]: row for row in report.results["contestants"]}
    assert list(rows) == [RESPONSES, MATCHED, UNMATCHED]
    assert all([turn["ok"] for turn in row["turns"]] == [True] * 3 for row in rows.values())
    lengths = [[turn["prompt_tokens"] for turn in row["turns"]] for row in rows.values()]
    assert lengths[0] == lengths[1] == lengths[2]
    assert rows[RESPONSES]["turns"][2]["cached_tokens"] > rows[RESPONSES]["turns"][1]["cached_tokens"] > 0
    assert [partial.partial for partial in checkpoints] == [True] * 3
    assert len(checkpoints[0].results["contestants"][0]["turns"]) == 1
    assert (report.results["ended_by"], report.results["abort_reason"]) == ("turns", None)
    assert report.config["model"] == chat_model.name
    assert "model_path" not in report.config
    assert report.config["server"]["model_id"] == chat_model.name
    assert 'aria-label="Latency per turn"' in turns_page(report)
    report.to_json()


def test_a_signal_ends_it_with_a_whole_report(
    chat_model: Path, tiny_engine: EngineConfig, started: list[tuple[str, ...]]
) -> None:
    def progress(done: float, work: str) -> None:
        if work.startswith("turn 3"):
            os.kill(os.getpid(), signal.SIGINT)

    report = run(bench_of(chat_model, tiny_engine, turns=10_000), progress, lambda partial: None)
    assert report.results["abort_reason"] == "SIGINT"
    assert report.results["ended_by"] is None
    assert not report.partial
    assert 2 <= len(report.results["contestants"][0]["turns"]) <= 3


@pytest.mark.usefixtures("started")
def test_peers_take_part_where_they_are_wanted(
    chat_model: Path, tiny_engine: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Peer:
        pid = server_pid = os.getpid()
        facts: ClassVar = {"library": "one"}

        def __init__(self, path: str, threads: int, program: str | None, context: int) -> None:
            assert (path, threads, program, context) == (str(chat_model), 1, "x", 0)
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

    monkeypatch.setattr(turns, "LlamaServer", Peer)
    monkeypatch.setattr(turns, "TransformersContestant", Slow)
    monkeypatch.setattr(turns, "require_llama_server", lambda path, program: None)
    wanted = {"ways": (RESPONSES,), "llama": True, "llama_server": "x", "transformers_turns": 1, "turns": 2}
    with scripted_http(answer) as address:
        report = run(bench_of(chat_model, tiny_engine, **wanted), quiet, lambda partial: None)
    rows = {row["contestant"]: row["summary"]["n_turns"] for row in report.results["contestants"]}
    assert rows == {RESPONSES: 2, LLAMA: 2, TRANSFORMERS: 1}
    assert report.results["software"][LLAMA] == {"library": "one"}
    assert closed == ["Slow", "Peer"]


def test_only_the_unmatched_way_needs_one_server(
    chat_model: Path, tiny_engine: EngineConfig, started: list[tuple[str, ...]]
) -> None:
    report = run(bench_of(chat_model, tiny_engine, ways=(UNMATCHED,), turns=1), quiet, lambda partial: None)
    assert started == [("--no-chat-matching",)]
    assert [row["contestant"] for row in report.results["contestants"]] == [UNMATCHED]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"turns": 0}, "turns must be at least 1"),
        ({"max_tokens": 0}, "max-tokens must be at least 1"),
        ({"message_tokens": 0}, "message-tokens must be at least 1"),
        ({"llama_context": -1}, "llama-context must not be negative"),
        ({"transformers_turns": -1}, "transformers-turns must not be negative"),
        ({"checkpoint_every_s": 0}, "partial-checkpoint-every-s must be above 0"),
        ({"ways": ()}, "one of our own ways"),
        ({"llama": True}, "llama.cpp needs a model in one .gguf file"),
    ],
)
def test_bad_settings_are_named(
    chat_model: Path, tiny_engine: EngineConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        bench_of(chat_model, tiny_engine, **changes)


def test_the_same_session_over_http_both_ways(
    chat_model: Path, tiny_engine: EngineConfig, started: list[tuple[str, ...]]
) -> None:
    bench = HttpSessionBench(
        str(chat_model), tiny_engine, Ends(turns=12), max_tokens=3, message_tokens=5, checkpoint_every_s=1e-9
    )
    checkpoints: list[Report] = []
    report = run_http_session(bench, quiet, checkpoints.append)
    assert started == [(), ("--no-chat-matching",)]
    sides = {row["contestant"]: row["aggregate"] for row in report.results["contestants"]}
    assert {name: side["n_turns"] for name, side in sides.items()} == {MATCHED: 12, UNMATCHED: 12}
    assert all(side["tail_over_head"] > 0 for side in sides.values())
    assert report.results["unmatched_over_matched"]["tail_latency_p50_s"] > 0
    assert [gate.name for gate in report.gates] == [
        "prefill_bounded",
        f"{MATCHED}: errors",
        f"{UNMATCHED}: errors",
    ]
    assert report.kind == "http-session"
    assert 0 <= report.results["bystanders_share"] <= 1
    assert report.config["ends"] == {"turns": 12, "duration_s": None, "target_history_tokens": None}
    assert len(checkpoints) == 12
    assert "http_session" not in http_session_page(checkpoints[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": 0}, "max-tokens must be at least 1"),
        ({"message_tokens": 0}, "message-tokens must be at least 1"),
        ({"checkpoint_every_s": -1}, "partial-checkpoint-every-s must be above 0"),
    ],
)
def test_bad_settings_of_an_http_session_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HttpSessionBench("m", EngineConfig(), **changes)

"""`bench session` against a real server: what it records, when it ends, and what a signal leaves."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import kakeya
from kakeya.bench import session
from kakeya.bench.report import Report
from kakeya.bench.server_process import ServerProcess
from kakeya.bench.session import DEFAULT_DURATION_S, SessionBench, run
from kakeya.bench.session_page import session_page, session_picture, session_sections, summary_table
from kakeya.bench.session_results import Limits, Turn, session_results
from kakeya.config import EngineConfig
from kakeya.errors import ConfigError

Bench = Callable[..., SessionBench]
CAPACITY = 32
BYTES_PER_TOKEN = 2 * 2 * 2 * 16 * 4


@pytest.fixture
def bench(tiny_server: ServerProcess, chat_model: Path, tiny_engine: EngineConfig) -> Bench:
    """A bench of the shared server."""

    def made(**changes: Any) -> SessionBench:
        settings = {"grpc_address": tiny_server.address, "max_tokens": 3, "message_tokens": 5}
        return SessionBench(str(chat_model), tiny_engine, **(settings | changes))

    return made


def quiet(done: float, work: str) -> None:
    pass


def talk(bench: SessionBench, at_turn: Callable[[int], object] = lambda turn: None) -> Report:
    """The report; `at_turn` is called before each turn with its number, from 0."""
    seen = -2  # "starting" is no turn

    def progress(done: float, work: str) -> None:
        nonlocal seen
        seen += 1
        assert 0 <= done <= 1
        if seen >= 0:
            at_turn(seen)

    return run(bench, progress, lambda partial: None)


def summary_row(report: Report, what: str) -> str:
    return {row[0]: row[1] for row in summary_table(report.results).rows}[what]


def close_all(server: ServerProcess) -> None:
    """Take every session away from whoever uses it."""
    with kakeya.Client(server.address) as client:
        for each in client.list_sessions():
            client.session(each.session_id).close()


def test_every_turn_is_recorded(bench: Bench, tiny_server: ServerProcess) -> None:
    report = talk(bench(turns=12, server_pid=tiny_server.pid))
    turns = report.results["turns"]
    assert [turn["history_length"] for turn in turns] == [8 * n for n in range(1, 13)]
    kept = [min(8 * n - 1, CAPACITY) * BYTES_PER_TOKEN for n in range(1, 13)]
    assert [turn["kv_live_bytes"] for turn in turns] == kept
    assert [turn["dropped_token_count"] for turn in turns] == [max(0, 8 * n - CAPACITY) for n in range(1, 13)]
    assert all(turn["ok"] and turn["n_emitted"] == 3 and turn["user_message_tokens"] == 5 for turn in turns)
    assert all(0 < turn["ttft_s"] <= turn["latency_s"] < 5 for turn in turns)
    assert all(turn["server_rss_bytes"] > 2**24 for turn in turns)
    starts = [turn["t_relative_s"] for turn in turns]
    assert starts == sorted(starts)
    assert report.results["ended_by"] == "turns"
    assert report.results["abort_reason"] is None
    assert report.results["sessions_opened"] == 1
    assert report.results["aggregate"]["kv_bounded"] is True
    assert 0 <= report.results["bystanders_share"] <= 1
    assert not report.partial
    assert "config" not in report.config
    assert report.config["server"]["window"] == 30


def test_the_session_is_closed_at_the_end(bench: Bench, tiny_server: ServerProcess) -> None:
    talk(bench(turns=2))
    with kakeya.Client(tiny_server.address) as client:
        assert client.list_sessions() == []


def test_the_run_ends_at_the_target_history(bench: Bench) -> None:
    report = talk(bench(target_history_tokens=50, message_tokens=9, turns=100))
    assert report.results["ended_by"] == "target history"
    assert report.results["turns"][-1]["history_length"] == 60
    assert report.results["turns"][-2]["history_length"] == 48


def test_the_run_ends_with_its_time(bench: Bench) -> None:
    report = talk(bench(duration_s=0.3))
    assert report.results["ended_by"] == "duration"
    assert 0.3 <= report.results["aggregate"]["duration_s"] < 3


@pytest.mark.parametrize(("spacing", "least", "most"), [(0.5, 0.49, 0.85), (0.35, 0.39, 0.7)])
def test_spacing_is_between_starts_and_an_overrun_starts_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, spacing: float, least: float, most: float
) -> None:
    encoded = session.Messages.encoded

    def slow(self: session.Messages, text: str) -> list[int]:
        time.sleep(0.4)
        return encoded(self, text)

    monkeypatch.setattr(session.Messages, "encoded", slow)
    report = talk(bench(turns=4, turn_spacing_s=spacing))
    starts = [turn["t_relative_s"] for turn in report.results["turns"]]
    gaps = sorted(later - earlier for earlier, later in pairwise(starts))
    assert gaps[0] > least
    assert gaps[1] < most


def test_messages_follow_from_the_seed(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[list[int]] = []
    encoded = session.Messages.encoded

    def noted(self: session.Messages, text: str) -> list[int]:
        said.append(encoded(self, text))
        return said[-1]

    monkeypatch.setattr(session.Messages, "encoded", noted)
    for seed in (1, 1, 2):
        talk(bench(turns=3, message_tokens=40, seed=seed))
    assert said[:3] == said[3:6] != said[6:]
    assert {len(message) for message in said} == {40}
    assert said[0] != said[1]


def test_a_lost_session_is_an_error_and_the_run_goes_on(
    bench: Bench, tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PAUSE_AFTER_ERROR_S", 0.05)

    report = talk(bench(turns=5), lambda turn: turn == 2 and close_all(tiny_server))
    assert [turn["ok"] for turn in report.results["turns"]] == [True, True, False, True, True]
    bad = report.results["turns"][2]
    assert bad["error_class"] == "SessionNotFound"
    assert bad["error_str"]
    assert report.results["sessions_opened"] == 2
    assert report.results["aggregate"]["n_errors"] == 1
    assert report.exit_status == 1
    assert "SessionNotFound" in session_page(report)


def test_an_error_that_leaves_the_session_goes_on_in_it(
    bench: Bench, tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "PAUSE_AFTER_ERROR_S", 0.05)
    encoded = session.Messages.encoded
    calls = 0

    def one_bad(self: session.Messages, text: str) -> list[int]:
        nonlocal calls
        calls += 1
        return [10**6] if calls == 2 else encoded(self, text)

    monkeypatch.setattr(session.Messages, "encoded", one_bad)
    report = talk(bench(turns=3))
    assert [turn.get("error_class") for turn in report.results["turns"]] == [None, "InvalidArgument", None]
    assert report.results["turns"][2]["history_length"] == 16
    assert report.results["sessions_opened"] == 1


@pytest.mark.parametrize("closed_at", [2, 3])
def test_a_session_lost_at_the_very_end_is_no_trouble(
    bench: Bench, tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch, closed_at: int
) -> None:
    monkeypatch.setattr(session, "PAUSE_AFTER_ERROR_S", 0.0)
    report = talk(bench(turns=3), lambda turn: turn == closed_at and close_all(tiny_server))
    assert report.results["aggregate"]["n_turns"] == closed_at


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_a_whole_report(bench: Bench, number: signal.Signals) -> None:
    before = signal.getsignal(number)

    def interrupt(turn: int) -> None:
        if turn == 3:
            os.kill(os.getpid(), number)

    began = time.monotonic()
    report = talk(bench(duration_s=60), interrupt)
    assert time.monotonic() - began < 10
    assert report.results["abort_reason"] == number.name
    assert report.results["ended_by"] is None
    assert not report.partial
    assert 3 <= len(report.results["turns"]) <= 4
    assert f"aborted: {number.name}" in session_page(report)
    assert signal.getsignal(number) is before


def test_a_signal_does_not_wait_for_the_turn(bench: Bench) -> None:
    def interrupt(turn: int) -> None:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()

    began = time.monotonic()
    report = talk(bench(turns=1, max_tokens=10_000_000), interrupt)
    assert time.monotonic() - began < 10
    assert report.results["turns"] == []
    assert report.results["abort_reason"] == "SIGINT"
    assert [gate.passed for gate in report.gates] == [None] * 4


def test_checkpoints_are_partial_and_complete_in_themselves(bench: Bench) -> None:
    checkpoints: list[Report] = []
    run(bench(turns=6, checkpoint_every_s=1e-6), quiet, checkpoints.append)
    assert [len(partial.results["turns"]) for partial in checkpoints] == [1, 2, 3, 4, 5, 6]
    assert all(partial.partial for partial in checkpoints)
    assert json.loads(checkpoints[2].to_json())["results"]["aggregate"]["n_turns"] == 3
    assert "not yet" in session_page(checkpoints[2])
    rare: list[Report] = []
    run(bench(turns=6), quiet, rare.append)
    assert rare == []


def test_the_page_shows_every_plot(bench: Bench, tiny_server: ServerProcess) -> None:
    report = talk(bench(turns=11, server_pid=tiny_server.pid))
    page = session_page(report)
    for title in ("Latency per turn", "KV memory per turn", "Server memory per turn"):
        assert f'aria-label="{title}"' in page
    unseen = session_page(talk(bench(turns=1)))
    assert "KV memory per turn" in unseen
    assert "Server memory per turn" not in unseen
    assert session_picture(report.results).startswith("<svg")
    assert [section.table.title for section in session_sections(report.results)] == [
        "One session",
        "By 10 minutes",
    ]


def test_others_are_told_from_the_server_only_when_its_process_is_known(
    bench: Bench, tiny_server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "share_of", lambda bystanders: 0.3)
    reports = talk(bench(turns=10, server_pid=tiny_server.pid)), talk(bench(turns=10))
    assert [report.results["bystanders_share"] for report in reports] == [0.3, None]
    shown = [summary_row(report, "share of the machine that others used") for report in reports]
    assert shown == ["30.0%", "–"]
    known, unknown = (
        next(gate for gate in report.gates if gate.name == "prefill_bounded") for report in reports
    )
    assert known.passed is None
    assert known.reason.startswith("others used 30% of the machine")
    assert unknown.passed is not None


def test_the_page_shows_peak_tail_and_slope_of_memory_and_old_reports_without_them() -> None:
    sizes = {"kv_live_bytes": 1, "server_rss_bytes": 1000}
    turns = [Turn(float(n), 8, 1.0, history_length=n, **sizes) for n in range(60)]
    turns[30] = replace(turns[30], server_rss_bytes=1500)
    results, _ = session_results(turns, 60.0, Limits(), 0.012)
    report = Report("session", {}, {}, {"ended_by": "turns", "abort_reason": None, **results})
    memory = "server memory over turn 20's, peak / last 20 turns / last turn"
    assert summary_row(report, memory) == "1.5000 / 1.0000 / 1.0000"
    assert summary_row(report, "its slope, KiB a minute") not in ("–", "+0.0")
    assert summary_row(report, "share of the machine that others used") == "1.2%"
    del report.results["bystanders_share"]
    for name in ("peak_over_settled", "tail_over_settled"):
        del report.results["aggregate"]["server_rss"][name]
    assert summary_row(report, memory) == "– / – / 1.0000"
    assert summary_row(report, "share of the machine that others used") == "–"


def test_without_an_end_it_lasts_half_an_hour(bench: Bench) -> None:
    assert bench().duration_s == DEFAULT_DURATION_S == 1800
    assert bench(turns=5).duration_s is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"duration_s": 0}, "duration-s must be above 0"),
        ({"turns": -1}, "turns must be above 0"),
        ({"target_history_tokens": 0}, "target-history-tokens must be above 0"),
        ({"checkpoint_every_s": 0}, "partial-checkpoint-every-s must be above 0"),
        ({"max_tokens": 0}, "max-tokens must be at least 1"),
        ({"message_tokens": 0}, "message-tokens must be at least 1"),
        ({"turn_spacing_s": -0.1}, "turn-spacing-s must not be negative"),
        ({"server_pid": 2**22 + 1}, "server-pid must be a running process"),
    ],
)
def test_bad_settings_are_named(bench: Bench, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(**changes)


def test_a_killed_bench_leaves_its_report_and_no_server(chat_model: Path, tmp_path: Path) -> None:
    output = tmp_path / "s.json"
    flags = ("--model", str(chat_model), "--duration-s", "60", "--max-tokens", "2", "--message-tokens", "4")
    quick = ("--partial-checkpoint-every-s", "0.1", "--threads", "1", "--output", str(output))
    program = "from kakeya.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "bench", "session", *flags, *quick],
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

"""The verbs that measure servers, from the command line to the exit status."""

import json
import signal
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kakeya.bench import capacity, overhead
from kakeya.bench.capacity import CapacityBench
from kakeya.bench.overhead import OverheadBench
from kakeya.bench.report import Report, now
from kakeya.bench.server_process import ServerProcess
from support.cli import Run


@pytest.fixture(autouse=True)
def keep_sigterm() -> None:
    """`main` gives SIGTERM a meaning of its own, for the process; tests share theirs."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_session_writes_prints_and_draws(
    kakeya_verb: Run, tiny_server: ServerProcess, tmp_path: Path
) -> None:
    output, drawing = tmp_path / "s.json", tmp_path / "s.svg"
    talk = ("--turns", "10", "--max-tokens", "2", "--message-tokens", "6", "--tail-limit", "1000")
    server = ("--grpc-address", tiny_server.address, "--server-pid", str(tiny_server.pid))
    files = ("--output", str(output), "--picture", str(drawing))
    outcome = kakeya_verb("bench", "session", *talk, *server, *files, "--json")
    printed = json.loads(outcome.out)
    assert printed == json.loads(output.read_text())
    assert printed["kind"] == "session"
    assert printed["results"]["aggregate"]["n_turns"] == 10
    assert outcome.status == 0
    assert output.with_suffix(".html").read_text().startswith("<!doctype html>")
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


def test_a_failed_gate_is_the_exit_status(
    kakeya_verb: Run, tiny_server: ServerProcess, tmp_path: Path
) -> None:
    talk = ("--turns", "10", "--max-tokens", "1", "--message-tokens", "1", "--tail-limit", "0.0001")
    files = ("--output", str(tmp_path / "s.json"))
    outcome = kakeya_verb("bench", "session", *talk, "--grpc-address", tiny_server.address, *files)
    assert outcome.status == 1
    assert "prefill_bounded" in outcome.out
    assert "failed" in outcome.out
    assert "One session" in outcome.out


@pytest.mark.usefixtures("on_shared_server")
def test_capacity_writes_prints_and_draws(kakeya_verb: Run, chat_model: Path, tmp_path: Path) -> None:
    output, drawing = tmp_path / "c.json", tmp_path / "c.svg"
    ramp = ("--levels", "1,2", "--window", "30", "--sink", "2", "--gen-tokens", "3", "--seed", "5")
    files = ("--output", str(output), "--picture", str(drawing))
    outcome = kakeya_verb("bench", "capacity", "--model", str(chat_model), *ramp, *files)
    assert "Agents at once" in outcome.out
    assert "wrong outputs" in outcome.out
    written = json.loads(output.read_text())
    assert [row["level"] for row in written["results"]["levels"]] == [1, 2]
    assert written["config"]["config"]["capacity"] == 2
    assert written["config"]["config"]["numerics"] == "exact"
    assert outcome.status == int(any(gate["passed"] is False for gate in written["gates"]))
    assert ElementTree.parse(drawing).getroot().tag.endswith("svg")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[CapacityBench | OverheadBench]:
    """Benches that were asked for and not run."""
    asked: list[CapacityBench | OverheadBench] = []

    def not_run(bench: CapacityBench | OverheadBench, *_: object) -> Report:
        asked.append(bench)
        machine = {"cpu": "any", "os": "any"}
        results = _NOTHING_MEASURED[type(bench)]
        return Report("any", {}, machine, results, finished_at=now())

    monkeypatch.setattr(capacity, "run", not_run)
    monkeypatch.setattr(overhead, "run", not_run)
    return asked


_NOTHING_MEASURED = {
    CapacityBench: {
        "levels": [],
        "summary": {
            "max_concurrent_agents_clean": 0,
            "outputs_checked": 0,
            "wrong_outputs": 0,
            "distinct_solo_outputs": 0,
            "solo_outputs": 0,
            "per_session_kv_bytes": None,
            "announced_kv_bytes_per_session": 1,
            "node_kv_upper_bound": 1,
            "node_kv_share_of_memory": None,
            "server_rss_when_ready": None,
            "server_peak_rss": None,
            "stopped_by": "",
        },
    },
    OverheadBench: {"front_ends": [], "absent": {}},
}


def test_presets_say_what_the_command_line_does_not(
    kakeya_verb: Run, asked: list[CapacityBench], chat_model: Path, tmp_path: Path
) -> None:
    common = ("bench", "capacity", "--model", str(chat_model), "--output", str(tmp_path / "c.json"))
    kakeya_verb(*common)
    kakeya_verb(*common, "--preset", "stress")
    kakeya_verb(*common, "--preset", "stress", "--window", "32", "--levels", "3", "--capacity", "2")
    light, stress, changed = asked
    assert light.levels[-1] == light.config.capacity == 256
    assert (light.config.cache.window, light.context_len) == (1024, 1028)
    assert stress.levels[-1] == stress.config.capacity == 2048
    assert (stress.config.cache.window, stress.gen_tokens, stress.prompt_len) == (64, 8, 8)
    assert (changed.levels, changed.config.cache.window, changed.config.capacity) == ((3,), 32, 2)


def test_overhead_asks_for_sixteen_streams(
    kakeya_verb: Run, asked: list[OverheadBench], chat_model: Path, tmp_path: Path
) -> None:
    outcome = kakeya_verb(
        "bench", "overhead", "--model", str(chat_model), "--output", str(tmp_path / "o.json")
    )
    assert (asked[0].streams, asked[0].tokens, asked[0].history, asked[0].limit) == (16, 96, 64, 0.95)
    assert outcome.status == 0
    assert "Streams at once" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("session", "--turns", "0"), "turns must be above 0"),
        (("session", "--output", "s.txt"), "*.json"),
        (("capacity", "--levels", "1,x"), "levels must be whole numbers"),
        (("capacity", "--levels", "4,2"), "levels must be rising"),
        (("capacity", "--capacity", "0", "--levels", "1"), "capacity must be"),
        (("overhead", "--streams", "0"), "streams must be at least 1"),
        (("overhead", "--threads", "0"), "threads must be"),
    ],
)
def test_bad_settings_are_refused(
    kakeya_verb: Run,
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = kakeya_verb("bench", *arguments)
    assert outcome.status == 2
    assert message in outcome.err
    assert list(tmp_path.iterdir()) == []

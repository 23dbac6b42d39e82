"""One run at a time, and every way in which one can end. The programs are real processes."""

import logging
import threading
from pathlib import Path

import pytest

from kakeya.bench.presets import Preset
from kakeya.bridge import runs as runs_module
from kakeya.bridge.archive import Archive
from kakeya.bridge.records import RunRecord, RunState
from kakeya.bridge.runs import Runs, preset_command
from kakeya.errors import InvalidArgument, PresetNotFound, ResourceExhausted, RunNotFound, Unavailable
from support.bridging import POLITE, STUBBORN, commands, presets, report, running, telling, until, writing

ENDINGS = {
    "passes": (telling(0.3, "counting") + writing(report()), RunState.PASSED, ""),
    "fails-a-gate": (writing(report(gate=False)) + "sys.exit(1)", RunState.GATES_FAILED, "failed: errors"),
    "dies": (
        "print('kakeya: no such model'); sys.exit(2)",
        RunState.FAILED,
        "exit status 2: kakeya: no such model",
    ),
    "is-killed": (
        writing(report(partial=True)) + "os.kill(os.getpid(), 9)",
        RunState.FAILED,
        "exit status -9: it said nothing",
    ),
    "says-nothing": ("", RunState.FAILED, "has no report.json"),
    "stays-partial": (writing(report(partial=True)), RunState.FAILED, "exit status 0"),
    "breaks-late": (writing(report()) + "sys.exit(1)", RunState.FAILED, "exit status 1"),
    "lies": (writing(report(kind="engine")), RunState.FAILED, "one of 'engine', not of capacity"),
    "babbles": (writing("[LONG"), RunState.FAILED, "cannot be read"),
    "links": ("os.symlink('/etc/passwd', report)", RunState.FAILED, "has no report.json"),
}


def ended(runs: Runs, run_id: str, owner: str = "me") -> RunRecord:
    until(lambda: runs.record(owner, run_id).is_over)
    return runs.record(owner, run_id)


def test_every_end_has_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kakeya")
    with running(tmp_path, {name: program for name, (program, *_) in ENDINGS.items()}, keep=99) as runs:
        for name, (_, state, reason) in ENDINGS.items():
            record = ended(runs, runs.start("me", name))
            assert (record.preset, record.state) == (name, state), record
            assert reason in record.reason
            has_one = name in ("passes", "fails-a-gate", "is-killed", "stays-partial", "breaks-late")
            assert record.has_report is has_one, name
            assert record.finished_at >= record.started_at
        assert [each.preset for each in runs.records("me")] == list(reversed(ENDINGS))
        assert runs.records("me")[-1].progress == 1.0
        kept = runs.records("me")
    logged = [line.message for line in caplog.records if line.name == "kakeya.bridge.runs"]
    assert logged.count("run started") == logged.count("run ended") == len(ENDINGS)
    with running(tmp_path, {"passes": ""}) as again:
        assert again.records("me") == kept, "a later bridge still knows them"


def test_what_a_preset_runs(tmp_path: Path) -> None:
    preset = Preset("light", "", "capacity", ("--preset", "light"), 1.0)
    command = preset_command(preset, tmp_path / "report.json")
    told = ("--progress", "json", "--output", str(tmp_path / "report.json"))
    assert command[3:] == ("bench", "capacity", *told, "--preset", "light")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "polite --output /tmp/x",
        "polite\0",
        "polite\n",
        " polite",
        "POLITE",
        "../polite",
        "/polite",
        "-polite",
        "pоlite",  # with a Cyrillic o
        "ｐolite",  # full width
        "polite\u200b",
        "x" * 100_000,
    ],
)
def test_nothing_but_a_name_of_the_manifest_runs(tmp_path: Path, name: str) -> None:
    with running(tmp_path, {"polite": POLITE}) as runs:
        with pytest.raises(PresetNotFound, match="there are: polite") as refused:
            runs.start("me", name)
        assert str(refused.value).isprintable()
        assert len(str(refused.value)) < 600
        assert runs.records("me") == []
        assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_one_run_at_a_time_and_each_is_its_owners(tmp_path: Path) -> None:
    with running(tmp_path, {"polite": POLITE}) as runs:
        run_id = runs.start("me", "polite", "first")
        until(lambda: runs.record("me", run_id).work)
        assert runs.start("me", "polite", "first") == run_id, "the same request is the same run"
        with pytest.raises(ResourceExhausted, match=f"your run {run_id} of 'polite' .* 25% done"):
            runs.start("me", "polite", "second")
        with pytest.raises(ResourceExhausted, match="a run of somebody else of 'polite'") as refused:
            runs.start("you", "polite", "first")
        assert run_id not in str(refused.value)
        for call in (runs.record, runs.cancel, lambda *who: runs.open_report(*who, "report.json")):
            with pytest.raises(RunNotFound, match="there is no run"):
                call("you", run_id)
        assert runs.records("you") == []
        for smuggled in ("../" + run_id, f"/{run_id}", f"{run_id}\0", f"{run_id}/."):
            with pytest.raises(RunNotFound):
                runs.open_report("me", smuggled, "report.json")
        (tmp_path / run_id / "go").touch()
        assert ended(runs, run_id).state is RunState.PASSED
        assert runs.start("me", "polite", "first") == run_id, "also when it is over"
        with pytest.raises(InvalidArgument, match="at most 128"):
            runs.start("me", "polite", "x" * 129)


def test_a_request_id_stands_for_one_preset(tmp_path: Path) -> None:
    with running(tmp_path, {"one": "", "other": ""}) as runs:
        ended(runs, runs.start("me", "one", "id"))
        with pytest.raises(InvalidArgument, match="stands for a run of 'one'"):
            runs.start("me", "other", "id")


def test_many_at_once_start_one(tmp_path: Path) -> None:
    outcomes: list[str] = []
    with running(tmp_path, {"polite": POLITE}) as runs:

        def start(number: int) -> None:
            try:
                outcomes.append(runs.start("me", "polite", f"id-{number}"))
            except ResourceExhausted:
                outcomes.append("")

        threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(map(bool, outcomes)) == [False] * 7 + [True]


def test_a_cancelled_run_leaves_its_report(tmp_path: Path) -> None:
    with running(tmp_path, {"polite": POLITE}) as runs:
        run_id = runs.start("me", "polite")
        until(lambda: runs.record("me", run_id).work)
        assert not runs.cancel("me", run_id).is_over
        record = ended(runs, run_id)
        assert (record.state, record.reason) == (RunState.CANCELLED, "its caller cancelled it")
        assert (record.has_report, record.progress) == (True, 0.25)
        assert runs.cancel("me", run_id) == record, "one that is over stays as it is"


def test_a_run_past_its_limit_is_ended_and_then_killed(tmp_path: Path) -> None:
    with running(tmp_path, {"stubborn": STUBBORN}, limit_s=0.3, grace_s=0.2) as runs:
        record = ended(runs, runs.start("me", "stubborn"))
        assert (record.state, record.has_report) == (RunState.TIMED_OUT, False)
        assert "0.3 s, its time limit" in record.reason
        assert record.elapsed_s >= 0.5, "it had its grace"


def test_endless_output_ends_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs_module, "LARGEST_OUTPUT", 2**20)
    with running(tmp_path, {"endless": "while True: os.write(1, b'y' * 65536)"}) as runs:
        record = ended(runs, runs.start("me", "endless"))
    assert (record.state, record.reason) == (
        RunState.FAILED,
        "it wrote more than 1,048,576 bytes beside its report",
    )
    assert len(record.output_tail) < 32_000


@pytest.mark.parametrize(("program", "finished"), [(POLITE, True), (STUBBORN, False)])
def test_a_bridge_that_ends_ends_its_run(tmp_path: Path, program: str, finished: bool) -> None:
    with running(tmp_path, {"a": program}, grace_s=60.0) as runs:
        run_id = runs.start("me", "a", "id")
        until(lambda: runs.record("me", run_id).work)
        runs.check_alive()
        assert runs.drain(20.0 if finished else 0.3) is finished
        with pytest.raises(Unavailable, match="shutting down"):
            runs.start("me", "a")
        assert runs.start("me", "a", "id") == run_id, "what was started can still be followed"
        runs.interrupt()
        record = ended(runs, run_id)
        assert (record.state, record.reason) == (RunState.CANCELLED, "the bridge was shut down")
        assert record.has_report is finished
        assert runs.drain(0)
        runs.interrupt()
    assert runs.ended.result(0) is None


def test_listeners_hear_of_changes(tmp_path: Path) -> None:
    heard = threading.Event()
    with running(tmp_path, {"polite": POLITE}) as runs, runs.listening(heard.set):
        runs.start("me", "polite")
        assert heard.wait(30)


def test_a_run_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    archive = Archive(tmp_path, 3)
    runs = Runs(presets({"a": ""}), archive, 1.0, command=lambda *_: ["/no/such/program"])
    with pytest.raises(OSError, match="No such file"):
        runs.start("me", "a")
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    runs._command = commands({"a": ""})
    ended(runs, runs.start("me", "a"))
    runs.close()


def test_a_full_disk_or_a_broken_watch_is_a_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of order")

    with running(tmp_path, {"a": STUBBORN}) as runs:
        monkeypatch.setattr(runs_module.Output, "feed", fail)
        run_id = runs.start("me", "a")
        monkeypatch.setattr(Archive, "save", fail)
        record = ended(runs, run_id)
        assert (record.state, record.reason) == (RunState.FAILED, "the bridge lost it; its log says why")
        runs.drain()
    assert "could not be stored" in caplog.text

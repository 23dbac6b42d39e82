"""`kakeya bridge` from the caller's side, and a real preset between two processes."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kakeya.bridge.archive import Archive
from kakeya.bridge.caller import Bridge
from kakeya.bridge.records import RunRecord
from kakeya.bridge.runs import Runs
from kakeya.cli import bridge as verbs
from kakeya.errors import RemoteError
from support import serving
from support.bridging import POLITE, bridging, report, running, telling, until, writing
from support.network import Papers
from support.programs import Run

DIES = "print('kakeya: no CUDA device \\x1b[2J'); sys.exit(1)"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    programs = {
        "passes": telling(0.5, "[bold]half") + writing(report()),
        "gate": writing(report(gate=False)) + "sys.exit(1)",
        "dies": DIES,
        "polite": POLITE,
        "pageless": writing(report()) + "os.unlink(report.replace('.json', '.html'))",
    }
    with running(tmp_path / "runs", programs, keep=99) as runs:
        yield runs


@pytest.fixture
def address(runs: Runs) -> Iterator[str]:
    with bridging(runs) as address:
        yield address


def test_a_run_comes_home(run: Run, address: str, folder: Path, runs: Runs) -> None:
    outcome = run("bridge", "run", address, "passes")
    assert outcome.status == 0, outcome.err
    assert "passes passed after" in outcome.err
    assert "errors" in outcome.out, "the gates are shown"
    (known,) = runs.records("local")
    stored = (runs.directory / known.run_id / "report.json").read_bytes()
    assert (folder / "bench-passes.json").read_bytes() == stored
    assert (folder / "bench-passes.html").read_text() == "<p>page"
    assert sorted(path.name for path in folder.iterdir()) == ["bench-passes.html", "bench-passes.json"]
    again = run("bridge", "attach", address, known.run_id, "--output", "again.json")
    assert (again.status, (folder / "again.json").read_bytes()) == (0, stored)
    fetched = run("bridge", "fetch", address, known.run_id, "--output", "more.json")
    assert (fetched.status, (folder / "more.json").read_bytes()) == (0, stored)
    assert "it is over: passed" in run("bridge", "cancel", address, known.run_id).err


def test_a_failed_run_is_the_exit_status(run: Run, address: str, folder: Path) -> None:
    gate = run("bridge", "run", address, "gate")
    assert (gate.status, "gate gates failed" in gate.err) == (1, True)
    assert (folder / "bench-gate.json").exists()
    dies = run("bridge", "run", address, "dies")
    assert dies.status == 1
    assert "exit status 1: kakeya: no CUDA device" in dies.err
    assert "\x1b" not in dies.err, "what it says does not drive the terminal"
    assert not (folder / "bench-dies.json").exists()
    pageless = run("bridge", "run", address, "pageless")
    assert (pageless.status, "page:" in pageless.err) == (0, False)
    listed = run("bridge", "runs", address)
    assert [line.split()[1] for line in listed.out.splitlines()[3:6]] == ["pageless", "dies", "gate"]
    told = json.loads(run("bridge", "runs", address, "--json").out)
    assert [each["state"] for each in told] == ["passed", "failed", "gates failed"]


def test_what_a_bridge_can_run(run: Run, address: str) -> None:
    assert "kakeya bench capacity --levels 1" in run("bridge", "presets", address).out
    assert json.loads(run("bridge", "presets", address, "--json").out)[0]["name"] == "passes"


def test_a_detached_run_goes_on(run: Run, address: str, runs: Runs) -> None:
    run_id = run("bridge", "run", address, "polite", "--detach").out.strip()
    until(lambda: runs.record("local", run_id).work)
    busy = run("bridge", "run", address, "passes")
    assert (busy.status, f"your run {run_id} of 'polite'" in busy.err) == (1, True)
    assert "attach" in run("bridge", "cancel", address, run_id).err
    ended = run("bridge", "attach", address, run_id, "--output", "cut.json")
    assert (ended.status, "polite cancelled" in ended.err, "partial" in ended.err) == (1, True, True)


def test_nobody_knows_how_long_a_run_took_whose_bridge_died(run: Run, tmp_path: Path) -> None:
    dead = Archive(tmp_path / "dead", keep=9)
    dead.create(RunRecord("cut", "passes", "2026-11-19T08:00:00+00:00", owner="local"))
    dead.close()
    with running(tmp_path / "dead", {"passes": writing(report())}) as later, bridging(later) as address:
        attached = run("bridge", "attach", address, "cut")
        listed = run("bridge", "runs", address)
    assert "passes failed: the bridge died during the run" in attached.err
    assert re.search(r"08:00:00\+00:00 +\? +0%", listed.out)


def test_ctrl_c_ends_the_run_and_brings_home_what_it_has(
    run: Run, address: str, runs: Runs, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(record: Any) -> Any:
        yield record
        until(lambda: runs.record("local", record.run_id).work)
        raise KeyboardInterrupt

    begin = Bridge.run
    monkeypatch.setattr(Bridge, "run", lambda self, *what: interrupted(next(begin(self, *what))))
    outcome = run("bridge", "run", address, "polite")
    assert outcome.status == 1
    assert "polite cancelled" in outcome.err
    assert json.loads((folder / "bench-polite.json").read_text())["partial"] is True


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("run", "there", "../../etc"), "a preset is called like"),
        (("run", "there", "pаsses"), "a preset is called like"),
        (("run", "there", "passes", "--output", "x.txt"), "must be named *.json"),
        (("run", "there", "passes", "--output", "no/such/x.json"), "existing directory"),
        (("presets", "there", "--tls-cert", "x"), "need --tls-ca"),
        (("serve", "--keep-runs", "0"), "keep-runs must be at least 1"),
        (("serve", "--bind", "0.0.0.0:0"), "not a loopback address"),
        (("serve", "--manifest", "absent.toml"), "cannot be read"),
    ],
)
def test_a_bad_setting_is_one_line(run: Run, arguments: tuple[str, ...], words: str) -> None:
    outcome = run("bridge", *arguments)
    assert outcome.status == 2
    assert words in outcome.err.splitlines()[-1]


def test_what_is_no_report_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Liar:
        def fetch(self, run_id: str, *, page: bool = False) -> bytes:
            return b"[]"

    record: Any = type("Record", (), {"run_id": "x", "preset": "fine"})
    with pytest.raises(RemoteError, match="is no report"):
        verbs._write_report(verbs.BenchScreen(), Liar(), record, None)  # type: ignore[arg-type]


@contextmanager
def bridge_process(*arguments: str) -> Iterator[tuple[str, list[str]]]:
    """A `kakeya bridge serve` that is ready: where, and what it says."""
    program = "from kakeya.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "bridge", "serve", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    said: list[str] = []
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: said.extend(process.stderr or ()))
    reader.start()
    try:
        until(lambda: re.search(r"on (localhost:\d+)", "".join(said)) or process.poll() is not None, 60)
        found = re.search(r"on (localhost:\d+)", "".join(said))
        assert found, said
        yield found[1], said
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, said
        reader.join()
        process.stderr.close()


@pytest.mark.slow
def test_a_real_preset_between_two_processes(run: Run, tmp_path: Path, folder: Path) -> None:
    """With keys and TLS: a conversation over a server that the benchmark starts, and its report at home."""
    model, papers = serving.write_model(tmp_path / "model"), Papers.make(tmp_path)
    tiny = ["--model", str(model), "--window", "30", "--sink", "2", "--threads", "1", "--dtype", "float32"]
    turns = ["--turns", "3", "--max-tokens", "2", "--message-tokens", "6"]
    manifest = tmp_path / "more.toml"
    manifest.write_text(
        f'[tiny-talk]\nproves = "it runs"\nbenchmark = "conversation"\n'
        f"arguments = {json.dumps([*tiny, *turns])}\nlimit_s = 100\n"
    )
    (tmp_path / "keys").write_text("the-key\n")
    serve = ("--bind", "localhost:0", "--manifest", str(manifest), "--runs-dir", str(tmp_path / "kept"))
    guarded = ("--tls-cert", str(papers.server.cert), "--tls-key", str(papers.server.key))
    with bridge_process(*serve, *guarded, "--api-key-file", str(tmp_path / "keys")) as (address, said):
        call = (address, "--tls-ca", str(papers.authority.cert), "--api-key")
        assert "Incorrect API key" in run("bridge", "presets", *call, "wrong").err
        assert "tiny-talk" in run("bridge", "presets", *call, "the-key").out
        outcome = run("bridge", "run", address, "tiny-talk", *call[1:], "the-key")
        assert "tiny-talk passed after" in outcome.err, outcome.err
        assert outcome.status == 0
    home = json.loads((folder / "bench-tiny-talk.json").read_text())
    assert (home["kind"], home["partial"], home["results"]["ways"][0]["n_turns"]) == (
        "conversation",
        False,
        3,
    )
    assert (folder / "bench-tiny-talk.html").read_text().startswith("<!doctype html>")
    log = "".join(said)
    assert "tiny-talk" in log
    assert "run ended" in log
    assert "TLS, one API key" in log
    assert "the-key" not in log

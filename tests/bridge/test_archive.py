import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.bridge import archive as archive_module
from kakeya.bridge.archive import PAGE, REPORT, Archive
from kakeya.bridge.records import RunRecord, RunState
from kakeya.errors import ConfigError, RunNotFound
from support.bridging import KIND, report


def record(run_id: str, second: int, state: RunState = RunState.PASSED) -> RunRecord:
    return RunRecord(run_id, "a", f"2026-01-31T12:00:{second:02}+00:00", "me", "r", state)


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[Archive]:
    archive = Archive(tmp_path / "runs", 2)
    yield archive
    archive.close()


def test_runs_are_found_again_in_order(archive: Archive, caplog: pytest.LogCaptureFixture) -> None:
    for each in (record("later", 9), record("first", 1)):
        archive.create(each)
    (archive.directory / "junk").mkdir()
    (archive.directory / "junk" / "run.json").write_text("{")
    (archive.directory / "moved").mkdir()
    told = (archive.folder("later") / "run.json").read_bytes()
    (archive.directory / "moved" / "run.json").write_bytes(told)
    assert list(archive.load().values()) == [record("first", 1), record("later", 9)]
    assert "cannot be read" in caplog.text
    assert archive.directory.stat().st_mode & 0o777 == 0o700


def test_a_run_is_told_where_its_folder_is_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    archive = Archive(Path("runs"), 2)
    assert archive.create(record("new", 1)) == tmp_path / "runs" / "new"
    archive.close()


@pytest.mark.parametrize("has_report", [True, False])
def test_a_run_whose_bridge_died_has_failed(archive: Archive, has_report: bool) -> None:
    folder = archive.create(record("cut", 1, RunState.RUNNING))
    if has_report:
        (folder / REPORT).write_text(report(partial=True))
    found = archive.load()["cut"]
    assert (found.state, found.reason) == (RunState.FAILED, "the bridge died during the run")
    assert found.has_report is has_report
    assert json.loads((folder / "run.json").read_text())["state"] == "failed", "and stays so"


def test_the_oldest_are_forgotten(archive: Archive) -> None:
    runs = {name: record(name, at) for at, name in enumerate(["a", "b", "c", "d"])}
    runs["b"] = record("b", 1, RunState.RUNNING)
    for each in runs.values():
        archive.create(each)
    archive.forget_oldest(runs)
    assert list(runs) == ["b", "d"], "one that is going on stays"
    assert not archive.folder("a").exists()
    assert archive.folder("d").exists()


def test_one_bridge_has_a_directory(archive: Archive, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use by process"):
        Archive(archive.directory, 2)
    archive.close()
    Archive(archive.directory, 2).close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made"):
        Archive(tmp_path / "file", 2)


def test_only_a_plain_file_of_a_size_is_given_away(
    archive: Archive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = archive.create(record("run", 1))
    with pytest.raises(RunNotFound, match=r"has no report\.json"):
        archive.open_report("run", REPORT)
    (tmp_path / "secret").write_text(report())
    (folder / REPORT).symlink_to(tmp_path / "secret")
    with pytest.raises(RunNotFound, match="has no report"):
        archive.open_report("run", REPORT)
    os.mkfifo(folder / PAGE)
    with pytest.raises(RunNotFound, match="no plain file"):
        archive.open_report("run", PAGE)
    (folder / REPORT).unlink()
    (folder / REPORT).write_text(report())
    assert archive.report("run", KIND).kind == KIND
    with pytest.raises(RunNotFound, match="one of 'capacity', not of engine"):
        archive.report("run", "engine")
    monkeypatch.setattr(archive_module, "LARGEST_REPORT", 100)
    with pytest.raises(RunNotFound, match="more than the 100 "):
        archive.report("run", KIND)
    (folder / REPORT).write_text("[]")
    with pytest.raises(RunNotFound, match="not a report"):
        archive.report("run", KIND)

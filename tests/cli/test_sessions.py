"""`kakeya sessions` against a real server."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kakeya.client import Client
from support.programs import Run
from support.serving import serving, write_model


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(write_model(tmp_path_factory.mktemp("model"))) as (server, _):
        yield server.address


def test_a_session_is_listed_shown_moved_and_closed(run: Run, address: str, tmp_path: Path) -> None:
    file, at = tmp_path / "session", ("--server", address)
    with Client(address) as client:
        session = client.create_session(label="mine " + "and a long label " * 9)
        session.append([5, 6, 7])
    listed = run("sessions", "list", *at)
    assert listed.status == 0
    assert session.session_id in listed.out
    assert "mine" in listed.out
    (facts,) = json.loads(run("sessions", "list", *at, "--json").out)
    assert facts == json.loads(run("sessions", "show", session.session_id, *at, "--json").out) | {
        "idle_seconds": facts["idle_seconds"]
    }
    shown = run("sessions", "show", session.session_id, *at).out
    assert "history length                    3" in shown
    assert run("sessions", "export", session.session_id, str(file), *at).status == 0
    assert file.stat().st_mode & 0o777 == 0o600
    imported = run("sessions", "import", str(file), "--label", "again", *at)
    assert run("sessions", "show", imported.out.strip(), *at).out.count("again") == 1
    for each in (session.session_id, imported.out.strip()):
        assert "closed after 3 tokens" in run("sessions", "close", each, *at).err
    gone = run("sessions", "close", session.session_id, *at)
    assert gone.status == 1
    assert "no session" in gone.err


def test_files_that_cannot_be_used_are_named(run: Run, address: str, tmp_path: Path) -> None:
    missing = run("sessions", "import", str(tmp_path / "none"), "--server", address)
    assert missing.status == 2
    assert "cannot be used" in missing.err
    (tmp_path / "text").write_text("no session")
    refused = run("sessions", "import", str(tmp_path / "text"), "--server", address)
    assert refused.status == 1
    assert "shorter than its header" in refused.err


def test_an_export_that_cannot_be_written_leaves_what_was_there(
    run: Run, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "session").write_text("before")
    with Client(address) as client:
        session = client.create_session()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        refused = run(
            "sessions", "export", session.session_id, str(tmp_path / "session"), "--server", address
        )
    assert (refused.status, "cannot be used" in refused.err) == (2, True)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]
    assert run("sessions", "close", session.session_id, "--server", address).status == 0

"""Directories of earlier versions are brought up to date, with what they hold."""

import json
import sqlite3
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest

from kakeya.config import StateConfig
from kakeya.storage.records import Details
from kakeya.storage.schema import MIGRATIONS
from kakeya.storage.store import StateStore


@pytest.mark.parametrize("version", range(1, len(MIGRATIONS) + 1))
def test_a_directory_of_an_earlier_version_keeps_its_sessions(tmp_path: Path, version: int) -> None:
    details = {name: value for name, value in asdict(Details("label", (1,))).items() if value}
    with closing(sqlite3.connect(tmp_path / "sessions.db")) as db:
        for script in MIGRATIONS[:version]:
            db.executescript(script)
        db.execute(f"PRAGMA user_version = {version}")
        db.execute("INSERT INTO histories VALUES (1, 2, NULL, 0)")
        db.execute("INSERT INTO segments VALUES (1, 0, 2, ?)", (bytes([7, 0, 0, 0, 8, 0, 0, 0]),))
        row = ("s", "me", 1, 1, 4, json.dumps(details).encode(), 5.0, True, None)
        db.execute(f"INSERT INTO sessions VALUES ({', '.join('?' * len(row))})", row)
        db.commit()
    store = StateStore(StateConfig(tmp_path), 10)
    (found,) = store.sessions()
    assert (found.session_id, found.length, found.details) == ("s", 2, Details("label", (1,)))
    assert store.tokens(found.history).tolist() == [7, 8]
    assert store.turns_of(found.history) == []
    assert store.documents("response") == []
    assert store.leaving() == []
    assert store.was_durable
    store.close()

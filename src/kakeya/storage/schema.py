"""The tables of the database, and how older ones become current."""

import sqlite3

from kakeya.errors import ConfigError

_FIRST = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
-- A fork's history goes on from the first parent_length tokens of its parent's, which are stored once.
CREATE TABLE histories (
    id INTEGER PRIMARY KEY,
    length INTEGER NOT NULL,
    parent INTEGER REFERENCES histories (id),
    parent_length INTEGER NOT NULL
);
CREATE INDEX children ON histories (parent);
CREATE TABLE segments (
    history INTEGER NOT NULL REFERENCES histories (id),
    start INTEGER NOT NULL,
    count INTEGER NOT NULL,
    tokens BLOB NOT NULL,
    PRIMARY KEY (history, start)
);
CREATE TABLE snapshots (file TEXT PRIMARY KEY, computed INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE sessions (
    id TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    number INTEGER NOT NULL,
    history INTEGER NOT NULL REFERENCES histories (id),
    sink INTEGER NOT NULL,
    details BLOB NOT NULL,
    used_at REAL NOT NULL,
    is_open INTEGER NOT NULL,
    snapshot TEXT REFERENCES snapshots (file)
);
CREATE INDEX shown ON sessions (snapshot);
CREATE TABLE answers (
    id INTEGER PRIMARY KEY,
    owner TEXT NOT NULL,
    call TEXT NOT NULL,
    session TEXT NOT NULL,
    request TEXT NOT NULL,
    answer BLOB NOT NULL,
    UNIQUE (owner, call, session, request)
);
CREATE INDEX answered ON answers (session);
"""
_DOCUMENTS = """
-- The contents of a document stay; its state changes often, and is small.
CREATE TABLE documents (
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    owner TEXT NOT NULL,
    contents BLOB NOT NULL,
    state BLOB NOT NULL,
    used_at REAL NOT NULL,
    PRIMARY KEY (kind, name)
);
"""
_HANDOFFS = """
-- A session that moves between servers: `leaving` for `peer`, `taken` here, `gone` on, or `refused` for ever.
-- Its epoch counts its moves. What was taken stays known when it is gone, because the sender may still ask.
CREATE TABLE handoffs (
    session TEXT PRIMARY KEY,
    epoch INTEGER NOT NULL,
    state TEXT NOT NULL,
    peer TEXT NOT NULL
);
"""
_TURNS = """
-- What turns brought back: tokens from this position of the history on saw it. `end`: of the answer.
CREATE TABLE turns (
    history INTEGER NOT NULL REFERENCES histories (id),
    position INTEGER NOT NULL,
    end INTEGER NOT NULL,
    recalled BLOB NOT NULL,
    PRIMARY KEY (history, position)
) WITHOUT ROWID;
"""
# One script for each version; the database's user_version counts those that were run.
MIGRATIONS = (_FIRST, _DOCUMENTS, _HANDOFFS, _TURNS)


def migrate(connection: sqlite3.Connection) -> None:
    """Bring the tables up to date. Raises ConfigError for a database of a later version than ours."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise ConfigError(
            f"the state directory has version {version} and this program knows {len(MIGRATIONS)}: "
            "use a newer program"
        )
    for number, script in enumerate(MIGRATIONS[version:], version + 1):
        connection.executescript(f"BEGIN; {script} PRAGMA user_version = {number}; COMMIT;")

"""Documents in the database: what a front end keeps for its own clients beside sessions, as JSON."""

import json
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

from kakeya.storage.sealing import Sealer
from kakeya.types import Document


class Documents:
    """All within a transaction of the caller's. What a document says is sealed; whose it is, is not."""

    def __init__(self, sealer: Sealer) -> None:
        self._sealer = sealer

    def of(self, db: sqlite3.Connection, kind: str) -> Iterator[Document]:
        """All of a kind, least recently used first."""
        query = (
            "SELECT name, owner, contents, state, used_at FROM documents WHERE kind = ? "
            "ORDER BY used_at, rowid"
        )
        for name, owner, contents, state, used_at in db.execute(query, (kind,)):
            opened = self._opened(contents, _context(kind, name))
            yield Document(
                kind, name, owner, opened, self._opened(state, _context(kind, name, " state")), used_at
            )

    def put(self, db: sqlite3.Connection, documents: Iterable[Document]) -> None:
        """Store them, in the place of earlier ones. Of one without contents only the rest is replaced, if it
        is there."""
        for each in documents:
            state = self._sealed(each.state, _context(each.kind, each.name, " state"))
            if each.contents is None:
                db.execute(
                    "UPDATE documents SET state = ?, used_at = ? WHERE kind = ? AND name = ?",
                    (state, each.used_at, each.kind, each.name),
                )
                continue
            contents = self._sealed(each.contents, _context(each.kind, each.name))
            db.execute(
                "INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
                "contents = excluded.contents, state = excluded.state, used_at = excluded.used_at",
                (each.kind, each.name, each.owner, contents, state, each.used_at),
            )

    def delete(self, db: sqlite3.Connection, names: Iterable[tuple[str, str]]) -> None:
        """Delete those of these kinds and names that are there."""
        db.executemany("DELETE FROM documents WHERE kind = ? AND name = ?", names)

    def _sealed(self, contents: Any, context: str) -> bytes | memoryview:
        return self._sealer.seal(json.dumps(contents, separators=(",", ":")).encode(), context)

    def _opened(self, sealed: bytes, context: str) -> Any:
        return json.loads(bytes(self._sealer.open(sealed, context)))


def _context(kind: str, name: str, part: str = "") -> str:
    return f"{kind} {name}{part}"

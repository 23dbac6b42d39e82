"""A session as it travels from one state directory to another: all that is stored of it, in one file.

4 bytes with the length of a JSON header, the header, the token ids, the contents of its snapshot. An envelope
with a digest is around them.
"""

import json
import struct
from array import array
from dataclasses import asdict, dataclass
from typing import Any

from kakeya.errors import StateDamaged
from kakeya.storage.envelope import contents_of, enveloped
from kakeya.storage.records import Details, Snapshot, StoredAnswer, StoredSession
from kakeya.storage.turns import StoredTurn
from kakeya.types import TokenRange

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class SessionFile:
    """A stored session with its tokens, the answers to its request ids, its snapshot, if it has one, and what
    its turns brought back."""

    session: StoredSession
    epoch: int
    model: dict[str, str]
    """What the directory says of its model and geometry."""
    tokens: "array[int]"
    answers: list[StoredAnswer]
    snapshot: bytes | bytearray | memoryview
    turns: tuple[StoredTurn, ...] = ()

    def packed(self) -> list[bytes | memoryview]:
        """The parts of the file."""
        header = {
            "session": asdict(self.session),
            "epoch": self.epoch,
            "model": self.model,
            "tokens": len(self.tokens),
            "answers": [asdict(each) for each in self.answers],
            "turns": [asdict(each) for each in self.turns],
        }
        written = json.dumps(header, separators=(",", ":")).encode()
        tokens = self.tokens.tobytes()
        return enveloped(_LENGTH.pack(len(written)), written, tokens, memoryview(self.snapshot))


def unpacked(file: bytes | bytearray) -> SessionFile:
    """Raises StateDamaged unless the file is whole and a session's."""
    contents = contents_of(file)
    try:
        (length,) = _LENGTH.unpack(contents[: _LENGTH.size])
        header = json.loads(bytes(contents[_LENGTH.size : _LENGTH.size + length]))
        rest = contents[_LENGTH.size + length :]
        tokens = array("i")
        end = header["tokens"] * tokens.itemsize
        tokens.frombytes(rest[:end])
        answers = [StoredAnswer(**each) for each in header["answers"]]
        session = _session(header["session"])
        turns = tuple(map(_turn, header.get("turns", ())))  # earlier versions sent none
        return SessionFile(session, header["epoch"], header["model"], tokens, answers, rest[end:], turns)
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise StateDamaged(f"the file does not hold a stored session: {error}") from error


def _turn(fields: dict[str, Any]) -> StoredTurn:
    return StoredTurn(**fields | {"recalled": tuple(TokenRange(**each) for each in fields["recalled"])})


def _session(fields: dict[str, Any]) -> StoredSession:
    details = fields["details"]
    kept = Details(**details | {"eos_token_ids": tuple(details["eos_token_ids"])})
    snapshot = fields["snapshot"] and Snapshot(**fields["snapshot"])
    return StoredSession(**fields | {"details": kept, "snapshot": snapshot, "is_open": False})

"""A session's state as a file of one's own: the same bytes that servers export, and the same checks."""

import os
import tempfile
from pathlib import Path

from kakeya.engine.slab import SlabGeometry
from kakeya.engine.state import SequenceState, on_host
from kakeya.engine.state_bytes import check_values, decode_state, encode_state
from kakeya.errors import KakeyaError, StateMismatch
from kakeya.storage.envelope import contents_of, enveloped, is_enveloped

_LONGEST_HISTORY_BYTES = 2**28


def longest_file(geometry: SlabGeometry) -> int:
    """The most bytes that a session's file can have: its slab, and a long history."""
    return 2 * geometry.slab_bytes + _LONGEST_HISTORY_BYTES


def write_state(path: Path, state: SequenceState) -> None:
    """Write atomically: the old file stays until the new one is whole. Fetches what lies on a device.

    Nobody else may read it: it is a talk. Raises KakeyaError.
    """
    parts = enveloped(*encode_state(on_host(state)))
    temporary = ""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary:
            Path(temporary).unlink(missing_ok=True)
        raise KakeyaError(f"cannot write session state to {path}: {error}") from error


def read_state(path: Path, fingerprint: str, geometry: SlabGeometry) -> SequenceState:
    """Read a file that may come from anywhere. Raises StateMismatch unless it is whole and for this engine.

    Files of earlier versions have no envelope.
    """
    file = _contents(path, longest_file(geometry))
    contents = contents_of(file) if is_enveloped(file) else file
    state = decode_state(contents, str(path), fingerprint, geometry)
    check_values(state, str(path))
    return state


def _contents(path: Path, longest: int) -> bytearray:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > longest:
                raise StateMismatch(f"{path} has {size:,} bytes, and no session here has over {longest:,}")
            contents = bytearray(size)
            file.readinto(contents)
            return contents
    except OSError as error:
        raise StateMismatch(f"{path} cannot be read as session state: {error}") from error

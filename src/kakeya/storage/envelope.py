"""The envelope of a file with a session's state: what it is, how long it is, and a digest of all of it.

    8 bytes   "KAKEYASE"
    2 bytes   version, little endian
    8 bytes   length of the contents
    32 bytes  SHA-256 of the contents

The contents are what the engine exports (safetensors), sealed where the state directory is encrypted.
"""

import hashlib
import struct

from kakeya.errors import StateDamaged

_MAGIC = b"KAKEYASE"
_HEADER = struct.Struct("<8sHQ32s")
VERSION = 1
OVERHEAD = _HEADER.size


def enveloped(contents: bytes | memoryview) -> list[bytes | memoryview]:
    """The parts of a file, in order."""
    digest = hashlib.sha256(contents).digest()
    return [_HEADER.pack(_MAGIC, VERSION, len(contents), digest), contents]


def contents_of(file: bytes | bytearray | memoryview) -> memoryview:
    """What lies in an envelope. Raises StateDamaged unless it is whole and unchanged."""
    view = memoryview(file)
    if len(view) < OVERHEAD:
        raise StateDamaged("the file is shorter than its header")
    magic, version, length, digest = _HEADER.unpack(view[:OVERHEAD])
    if magic != _MAGIC:
        raise StateDamaged("the file does not hold a session's state")
    if version != VERSION:
        raise StateDamaged(f"the file has version {version} of the format, known is {VERSION}")
    contents = view[OVERHEAD:]
    if len(contents) != length:
        raise StateDamaged(f"the file should hold {length} bytes and holds {len(contents)}")
    if hashlib.sha256(contents).digest() != digest:
        raise StateDamaged("the file's contents do not match their digest")
    return contents

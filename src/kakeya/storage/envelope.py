"""The envelope of a file with a session's state: what it is, how long it is, and a digest of all of it.

    8 bytes   "KAKEYASE"
    2 bytes   version, little endian
    8 bytes   length of the contents
    16 bytes  XXH3 of the contents, 128 bits
    30 bytes  nothing, so that the contents of a mapped file are aligned

The contents are what the engine exports (safetensors), sealed where the state directory is encrypted. The
digest finds damage; who wants to deceive can compute it. So the contents are checked as well.
"""

import struct

import xxhash

from kakeya.errors import StateDamaged

_MAGIC = b"KAKEYASE"
_HEADER = struct.Struct("<8sHQ16s30x")
VERSION = 2
OVERHEAD = _HEADER.size


def enveloped(*contents: bytes | memoryview) -> list[bytes | memoryview]:
    """The parts of a file, in order: a header, and the parts of its contents."""
    digest = xxhash.xxh3_128()
    for part in contents:
        digest.update(part)
    return [_HEADER.pack(_MAGIC, VERSION, sum(map(len, contents)), digest.digest()), *contents]


def is_enveloped(file: bytes | bytearray | memoryview) -> bool:
    """Whether it begins as an envelope does."""
    return bytes(file[: len(_MAGIC)]) == _MAGIC


def contents_of(file: bytes | bytearray | memoryview) -> memoryview:
    """What lies in an envelope. Raises StateDamaged unless it is whole and unchanged."""
    view = memoryview(file)
    if len(view) < OVERHEAD:
        raise StateDamaged("the file is shorter than its header")
    magic, version, length, digest = _HEADER.unpack(view[:OVERHEAD])
    if magic != _MAGIC:
        raise StateDamaged("the file does not hold a session's state")
    if _HEADER.pack(magic, version, length, digest) != view[:OVERHEAD]:
        raise StateDamaged("the file has something where its header has nothing")
    if version != VERSION:
        raise StateDamaged(f"the file has version {version} of the format, known is {VERSION}")
    contents = view[OVERHEAD:]
    if len(contents) != length:
        raise StateDamaged(f"the file should hold {length} bytes and holds {len(contents)}")
    if xxhash.xxh3_128_digest(contents) != digest:
        raise StateDamaged("the file's contents do not match their digest")
    return contents

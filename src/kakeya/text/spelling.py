"""How a tokenizer's vocabulary spells bytes.

The bytes of a sequence are the bytes of its tokens joined. So streaming and decoding at once cannot disagree,
whatever is generated.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kakeya.errors import UnsupportedModel

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class Spelling:
    """`token_bytes(token, added)` gives the bytes a token stands for; `added` tells added tokens apart.

    `drops_first_space`: the first space of a text is an artefact of encoding and is not part of it.
    """

    token_bytes: Callable[[str, bool], bytes]
    drops_first_space: bool


def spelling_of(decoder: Any) -> Spelling:
    """The spelling that a `tokenizers` decoder implies; raises UnsupportedModel for one it cannot name."""
    if decoder is None:
        raise UnsupportedModel("the tokenizer has no decoder; byte-level or SentencePiece-style is needed")
    steps = {step["type"]: step for step in _flatten(json.loads(decoder.__getstate__()))}
    if "ByteLevel" in steps:
        return Spelling(_byte_level_bytes, drops_first_space=False)
    if "ByteFallback" in steps or "Metaspace" in steps:
        return Spelling(_sentencepiece_bytes, drops_first_space=_strips_start(steps))
    raise UnsupportedModel(
        f"tokenizer decoder {'+'.join(steps)} is not supported; byte-level and SentencePiece-style are"
    )


def _flatten(step: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if step["type"] != "Sequence":
        yield step
    for inner in step.get("decoders", ()):
        yield from _flatten(inner)


def _strips_start(steps: Mapping[str, Mapping[str, Any]]) -> bool:
    if "Metaspace" in steps:
        return bool(steps["Metaspace"]["prepend_scheme"] != "never")
    return "Strip" in steps and bool(steps["Strip"]["start"])


def _byte_characters() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + offset): byte for offset, byte in enumerate(others)})
    return table


_BYTE_OF = _byte_characters()


def _byte_level_bytes(token: str, added: bool) -> bytes:
    # An added token is matched in the text as it is, so it is never written in the byte alphabet.
    if added or any(character not in _BYTE_OF for character in token):
        return token.encode()
    return bytes(_BYTE_OF[character] for character in token)


def _sentencepiece_bytes(token: str, added: bool) -> bytes:
    byte = None if added else _BYTE_TOKEN.fullmatch(token)
    if byte is not None:
        return bytes.fromhex(byte[1])
    return token.replace(_SPACE_MARK, " ").encode()

"""An envelope tells what was cut or changed."""

import random

import pytest

from kakeya.errors import StateDamaged
from kakeya.storage.envelope import OVERHEAD, contents_of, enveloped


def test_what_is_put_in_comes_out() -> None:
    assert contents_of(b"".join(enveloped(b"contents"))) == b"contents"
    assert contents_of(b"".join(enveloped(b""))) == b""


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    whole = b"".join(enveloped(random.Random(1).randbytes(100)))
    for place in range(len(whole)):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        with pytest.raises(StateDamaged):
            contents_of(damaged)
        with pytest.raises(StateDamaged):
            contents_of(whole[:place])
    with pytest.raises(StateDamaged, match="should hold"):
        contents_of(whole + b"x")
    assert len(whole) == OVERHEAD + 100

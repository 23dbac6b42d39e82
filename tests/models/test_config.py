"""Configurations check themselves."""

from dataclasses import replace

import pytest

from kakeya.errors import CorruptCheckpoint
from support.tiny import parse_config


def test_a_config_is_checked_however_it_is_made() -> None:
    with pytest.raises(CorruptCheckpoint, match="layer_ropes must have one entry"):
        replace(parse_config(), layer_ropes=())

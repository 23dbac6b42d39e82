"""Asking a Ray that does not answer. One that does is asked in test_on_ray.py."""

import socket

import pytest

from kakeya.cluster import lookup
from kakeya.errors import Unavailable
from support.serving import free_port

pytest.importorskip("ray", reason="the extra `cluster` is not installed: pip install 'kakeya[cluster]'")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_why_ray_could_not_be_asked_is_told() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match=f"cannot be asked: .*no Ray head answers at {address}"):
        lookup.look_up(address)


def test_a_head_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(Unavailable, match=rf"Ray's head at {address} does not answer in 0\.5 s"):
            lookup.look_up(address)

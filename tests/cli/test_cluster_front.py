"""`kakeya serve --cluster` as a real process, before homes whose addresses it is given."""

from pathlib import Path

import pytest

from kakeya.wire import runtime_pb2 as pb
from support.clustering import SECRET, town_of
from support.programs import process
from support.serving import connected, new_session, token_ids, write_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_front_end_without_ray_serves_what_its_homes_have(tmp_path: Path) -> None:
    model, secret = write_model(tmp_path / "model"), tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    with town_of(model, tmp_path / "shared", "a", "b") as town:
        (seed, *_) = (home.server.address for home in town.homes.values())
        where = ("--cluster", f"homes:{seed},", "--cluster-secret", str(secret))
        with process("serve", *where, "--bind", "127.0.0.1:0", "--http", "off") as front:
            address = front.wait_for(r"serves a cluster of 2 homes on (127\.0\.0\.1:\d+)")
            front.wait_for(r"(callers)")
            for name, home in town.homes.items():
                assert f"home      {name}: tiny, 4 slabs, 0 sessions, on {home.server.address}" in front.said
            assert "http " not in front.said
            assert SECRET not in front.said
            with connected(address) as stub:
                sessions = [new_session(stub, [3, 5, 7]) for _ in range(2)]
                asked = [pb.GenerateRequest(session_id=each, max_tokens=5) for each in sessions]
                said = [token_ids(stub.Generate(each)) for each in asked]
            assert said[0] == said[1]
            assert len(said[0]) == 5
            assert [len(home.runtime.home.session_ids()) for home in town.homes.values()] == [1, 1]
            assert front.end() == 0, front.said
            assert "Traceback" not in front.said

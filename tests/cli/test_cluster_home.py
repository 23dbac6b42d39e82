"""`kakeya cluster home` as a real process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kakeya.cluster.calling import HomeCalls
from kakeya.cluster.members import make_secret
from kakeya.wire import cluster_pb2 as pb
from support.serving import write_model
from support.untraced import KAKEYA

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_home_ends_with_its_standard_input(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    secret = make_secret(tmp_path / "secret")
    place = ("--name", "h-1", "--node", "here", "--label", "gold", "--shared", str(tmp_path), "--leash")
    listen = ("--bind", "127.0.0.1:0", "--http", "127.0.0.1:0")
    size = ("--window", "60", "--dtype", "float32", "--threads", "1", "--capacity", "2")
    arguments = ("cluster", "home", "--model", str(model), *place, *listen, *size)
    with subprocess.Popen(
        [sys.executable, "-c", KAKEYA, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        address = json.loads(process.stdout.readline())["address"]
        process.stdin.write("what it is told does not matter\n")
        process.stdin.flush()
        with HomeCalls(address, secret) as calls:
            home = calls.beat(pb.View())
        assert (home.name, home.node, home.slabs, list(home.labels)) == ("h-1", "here", 2, ["gold"])
        process.stdin.close()
        assert process.wait(60) == 0

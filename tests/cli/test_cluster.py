"""`kakeya cluster`: what its verbs refuse before anything is started, and all of them on a real Ray."""

import re
from pathlib import Path

import httpx
import pytest

from kakeya.cli import cluster as cli
from support.clustering import ray_of_two_nodes
from support.programs import Outcome, Run, process
from support.serving import write_model


def test_help_names_every_verb(run: Run) -> None:
    outcome = run("cluster", "--help")
    assert outcome.status == 0
    for verb in ("up", "status", "drain", "undrain", "down", "home"):
        assert f" {verb} " in outcome.out


def test_without_ray_the_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    for arguments in (
        ("status",),
        ("down",),
        ("drain", "node"),
        ("undrain", "node"),
        ("up", "--shared", str(tmp_path), "--model", "m", "--host", "127.0.0.1"),
    ):
        outcome = run("cluster", *arguments)
        assert outcome.status == 2
        assert "kakeya[cluster]" in outcome.err


def test_homes_listen_beyond_their_machine_only_if_told_so(run: Run, tmp_path: Path) -> None:
    outcome = run("cluster", "up", "--shared", str(tmp_path), "--model", "m")
    assert outcome.status == 2
    assert "--insecure" in outcome.err


def test_an_amount_of_a_resource_is_a_number(run: Run, tmp_path: Path) -> None:
    where = ("--shared", str(tmp_path / "shared"), "--model", "m", "--host", "127.0.0.1")
    outcome = run("cluster", "up", *where, "--resource", "gold=much")
    assert outcome.status == 2
    assert "--resource is NAME or NAME=AMOUNT, got 'gold=much'" in outcome.err
    assert not (tmp_path / "shared").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), "--shared"),
        (("--shared", "d", "--name", "A"), "name"),
        (("--shared", "d", "--state-dir", "s"), "--state-dir"),
        (("--shared", "d", "--durability", "none"), "durability"),
        (("--shared", "d", "--http", "off"), "--http"),
        (("--shared", "missing"), "secret"),
    ],
)
def test_a_home_refuses_what_cannot_be(run: Run, flags: tuple[str, ...], said: str) -> None:
    outcome = run("cluster", "home", "--model", "m", *flags)
    assert outcome.status == 2
    assert said in outcome.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--cluster", "homes:127.0.0.1:1"), "--cluster-secret"),
        (("--cluster", "homes:127.0.0.1:1", "--state-dir", "s"), "--state-dir"),
        (("--cluster", "homes:127.0.0.1:1", "--metrics-port", "1"), "--metrics-port"),
        (
            (
                "--cluster",
                "a",
                "--model",
                "m",
                "--quota-sessions",
                "3",
                "--no-chat-matching",
                "--capacity",
                "4",
            ),
            "leave out --model, --capacity, --quota-sessions, --no-chat-matching, which homes have",
        ),
        (("--cluster", "homes:127.0.0.1:1", "--cluster-secret", "missing"), "secret"),
    ],
)
def test_a_front_end_refuses_what_cannot_be(run: Run, flags: tuple[str, ...], said: str) -> None:
    outcome = run("serve", *flags)
    assert outcome.status == 2
    assert said in " ".join(outcome.err.split())


def test_a_front_end_takes_what_it_uses(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_ADMISSION", "reject")
    where = ("--cluster", "homes:127.0.0.1:1", "--cluster-secret", str(tmp_path / "missing"))
    used = ("--max-connections", "8", "--cors-origin", "*", "--no-chat-deprecation", "--api-key", "a-key")
    outcome = run("serve", *where, *used)
    assert "leave out --admission, which homes have" in " ".join(outcome.err.split())
    monkeypatch.delenv("KAKEYA_ADMISSION")
    outcome = run("serve", *where, *used)
    assert outcome.status == 2
    assert "secret" in outcome.err
    assert "leave out" not in outcome.err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cluster_comes_up_is_drained_and_goes_down(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A response stays where clients find it, though the only home must leave its node."""
    pytest.importorskip("ray", reason="the extra `cluster` is not installed: pip install 'kakeya[cluster]'")
    model = write_model(tmp_path / "tiny")
    group = ("--shared", str(tmp_path / "shared"), "--model", str(model), "--host", "127.0.0.1")
    size = ("--window", "60", "--dtype", "float32", "--threads", "1", "--capacity", "4")
    monkeypatch.setenv("COLUMNS", "200")
    with ray_of_two_nodes() as ray:
        monkeypatch.setenv("KAKEYA_RAY_ADDRESS", ray)

        def cluster(*arguments: str) -> Outcome:
            outcome = run("cluster", *arguments)
            assert outcome.status == 0, outcome.err
            return outcome

        assert "0 homes serve" in said(cluster("up", *group, "--homes", "0"))
        nowhere = run("cluster", "up", *group, "--resource", "gold", "--gpus", "1", "--timeout-s", "2")
        assert nowhere.status == 1
        assert "Ray may have no node with room for it" in nowhere.err
        assert "0 homes have ended" in said(cluster("down"))  # and none waits for its node any more
        up = cluster("up", *group, "--", *size)
        assert f"1 homes serve. Reach them with: kakeya serve --cluster {ray}" in said(up)
        front = ("serve", "--cluster", ray, "--bind", "127.0.0.1:0", "--http", "127.0.0.1:0")
        with process(*front) as serving:
            url = serving.wait_for(r"http +(http://\S+)/ \(console\)", 120.0)
            with httpx.Client(base_url=url, timeout=120.0) as http:
                asked = {"model": str(model), "input": "hello", "max_output_tokens": 16}
                made = http.post("/v1/responses", json=asked)
                assert made.status_code == 200, made.text
                node = node_of(cluster("status"))
                assert "none, since none was draining" in said(cluster("undrain", node))
                drained = said(cluster("drain", node))
                assert f"Node {node} has no home any more" in drained
                assert "home-1 keeps responses or conversations, and goes on at another node" in drained
                assert node_of(cluster("status")) != node
                assert http.get(f"/v1/responses/{made.json()['id']}").json() == made.json()
            assert serving.end() == 0, serving.said
        assert "1 homes have ended" in said(cluster("down"))
        gone = run("cluster", "status")
        assert gone.status == 1
        assert "start one with `kakeya cluster up`" in gone.err


def said(outcome: Outcome) -> str:
    return " ".join((outcome.out + outcome.err).split())


def node_of(status: Outcome) -> str:
    """Where the only home is, and that it serves."""
    row = re.search(r"home-1 +(\w{8}) +\S+/tiny( +[\d,]+){6} +serving +127\.0\.0\.1:\d+", status.out)
    assert row, status.out
    return row[1]

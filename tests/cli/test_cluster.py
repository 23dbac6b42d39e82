"""`kakeya cluster`: what its verbs refuse before anything is started."""

from pathlib import Path

import pytest

from kakeya.cli import cluster as cli
from support.programs import Run


def test_help_names_every_verb(run: Run) -> None:
    outcome = run("cluster", "--help")
    assert outcome.status == 0
    for verb in ("up", "status", "drain", "down", "home"):
        assert f" {verb} " in outcome.out


def test_without_ray_the_extra_is_named(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    for arguments in (
        ("status",),
        ("down",),
        ("drain", "node"),
        ("up", "--shared", str(tmp_path), "--model", "m", "--host", "127.0.0.1"),
    ):
        outcome = run("cluster", *arguments)
        assert outcome.status == 2
        assert "kakeya[cluster]" in outcome.err


def test_homes_listen_beyond_their_machine_only_if_told_so(run: Run, tmp_path: Path) -> None:
    outcome = run("cluster", "up", "--shared", str(tmp_path), "--model", "m")
    assert outcome.status == 2
    assert "--insecure" in outcome.err


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
        (("--cluster", "homes:127.0.0.1:1", "--cluster-secret", "missing"), "secret"),
    ],
)
def test_a_front_end_refuses_what_cannot_be(run: Run, flags: tuple[str, ...], said: str) -> None:
    outcome = run("serve", *flags)
    assert outcome.status == 2
    assert said in outcome.err

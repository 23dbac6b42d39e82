"""The list of homes, who is heard, and small values that members share."""

from pathlib import Path

import pytest

from kakeya.cluster.exposition import labelled
from kakeya.cluster.homes import ranked
from kakeya.cluster.members import Whereabouts, check_name, home_in, make_secret, newest, read_secret
from kakeya.cluster.registry import SILENT_PROPOSER_S, SILENT_S, Registry
from kakeya.errors import ConfigError
from kakeya.wire import cluster_pb2 as pb


def test_the_home_with_the_highest_epoch_is_the_home() -> None:
    now = [0.0]
    registry = Registry(lambda: now[0])
    registry.report(pb.Home(name="a", epoch=2, address="new"))
    registry.report(pb.Home(name="a", epoch=1, address="old"))
    assert [home.address for home in registry.view().homes] == ["new"]
    registry.drain("a")
    now[0] = SILENT_S + 1
    (home,) = registry.report(pb.Home(name="b", epoch=1)).homes[:1]
    assert (home.name, home.draining, home.silent) == ("a", True, True)
    registry.report(pb.Home(name="a", epoch=3))
    assert not registry.view().homes[0].silent
    registry.remove("a")
    assert [home.name for home in registry.view().homes] == ["b"]
    registry.report(pb.Home(name="a", epoch=4))
    assert not registry.view().homes[0].draining
    assert newest([pb.Home(name="a", epoch=1), pb.Home(name="a", epoch=2)])["a"].epoch == 2


def test_proposers_that_are_silent_are_left_out() -> None:
    now = [0.0]
    registry = Registry(lambda: now[0])
    registry.propose("g", "one")
    now[0] = SILENT_PROPOSER_S
    registry.propose("g", "two")
    registry.propose("other", "three")
    assert registry.proposers("g") == ["one", "two"]
    now[0] += 1
    assert registry.proposers("g") == ["two"]


def test_ids_name_their_home() -> None:
    assert home_in("a.x_y-z") == "a"
    assert home_in("resp_gpu-2.0af") == "gpu-2"
    assert home_in("0af_1") == home_in("") == ""
    assert check_name("home-1") == "home-1"
    for wrong in ("", "-a", "A", "a.b", "a_b", "x" * 33):
        with pytest.raises(ConfigError, match="name"):
            check_name(wrong)


def test_a_secret_is_made_once_and_kept_from_others(tmp_path: Path) -> None:
    path = tmp_path / "shared" / "secret"
    secret = make_secret(path)
    assert make_secret(path) == secret == read_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("short")
    with pytest.raises(ConfigError, match="16"):
        read_secret(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_secret(tmp_path / "none")


def test_few_keys_change_their_home_when_one_comes() -> None:
    keys = [str(number).encode() for number in range(400)]
    before = [ranked(key, ["a", "b", "c"])[0] for key in keys]
    after = [ranked(key, ["a", "b", "c", "d"])[0] for key in keys]
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {new for _, new in moved} == {"d"}
    assert 60 < len(moved) < 140
    assert min(before.count(name) for name in "abc") > 90


def test_of_whereabouts_the_oldest_are_forgotten() -> None:
    known = Whereabouts(2)
    for name in ("x", "y", "x", "z"):
        known.put(name, name.upper())
    assert [known.get(name) for name in "xyz"] == ["X", "", "Z"]


def test_metrics_say_which_home_they_are_of() -> None:
    text = '# HELP m Help {x}.\n# TYPE m gauge\nm{k="v 1"} 2.0\n# TYPE n counter\nn 1.0\n'
    assert labelled({"a": text, "b": text}) == (
        '# HELP m Help {x}.\n# TYPE m gauge\nm{home="a",k="v 1"} 2.0\nm{home="b",k="v 1"} 2.0\n'
        '# TYPE n counter\nn{home="a"} 1.0\nn{home="b"} 1.0\n'
    )

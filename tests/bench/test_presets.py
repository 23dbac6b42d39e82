from pathlib import Path

import pytest

from kakeya.bench.presets import Preset, is_name, preset_named, read_presets
from kakeya.bench.registry import KINDS
from kakeya.errors import ConfigError, PresetNotFound

GOOD = 'proves = "it"\nbenchmark = "engine"\narguments = ["--quick"]\nlimit_s = 60\n'


def manifest(folder: Path, text: str) -> Path:
    path = folder / "more.toml"
    path.write_text(text)
    return path


def test_the_package_has_presets() -> None:
    presets = read_presets()
    named = {"agent-capacity-light", "agent-capacity-stress", "session-4h", "speculation-rtt", "gpu-quick"}
    assert named <= presets.keys()
    assert all(name == each.name and is_name(name) for name, each in presets.items())
    assert {each.benchmark for each in presets.values()} <= set(KINDS)
    assert presets["agent-capacity-light"].command == "kakeya bench capacity --preset light"
    assert presets["session-4h"].limit_s > 4 * 3600


def test_a_file_adds_to_them(tmp_path: Path) -> None:
    presets = read_presets([manifest(tmp_path, f"[mine]\n{GOOD}")])
    assert presets["mine"] == Preset("mine", "it", "engine", ("--quick",), 60.0)
    assert len(presets) == len(read_presets()) + 1


@pytest.mark.parametrize(
    "text, words",
    [
        ("[gpu-quick]\n" + GOOD, "a preset 'gpu-quick' already"),
        ("[Mine]\n" + GOOD, "a name has lower-case letters"),
        ('["../mine"]\n' + GOOD, "a name has"),
        ('["/mine"]\n' + GOOD, "a name has"),
        ('["-mine"]\n' + GOOD, "a name has"),
        ('["mi\\u0000ne"]\n' + GOOD, "a name has"),
        ('["mіne"]\n' + GOOD, "a name has"),  # with a Cyrillic i
        (f"[{'x' * 65}]\n" + GOOD, "a name has"),
        ("[mine]\n" + GOOD + 'shell = "rm"\n', "and nothing else"),
        ('[mine]\nproves = "it"\n', "and nothing else"),
        ("mine = 3\n", "and nothing else"),
        ("[mine]\n" + GOOD.replace('"engine"', '"/bin/sh"'), "benchmark must be one of"),
        ("[mine]\n" + GOOD.replace('"engine"', "[1]"), "benchmark must be one of"),
        ("[mine]\n" + GOOD.replace('["--quick"]', '"--quick; rm"'), "arguments must be a list"),
        ("[mine]\n" + GOOD.replace('["--quick"]', str(["x"] * 65)), "arguments must be a list"),
        ("[mine]\n" + GOOD.replace('["--quick"]', "[1]"), "each of the arguments"),
        ("[mine]\n" + GOOD.replace('["--quick"]', '["a\\u0000b"]'), "each of the arguments"),
        ("[mine]\n" + GOOD.replace('["--quick"]', '[""]'), "each of the arguments"),
        ("[mine]\n" + GOOD.replace('"it"', '"\\u001b[2J"'), "proves must be a text"),
        ("[mine]\n" + GOOD.replace('"it"', f'"{"x" * 1001}"'), "proves must be a text"),
        *[
            ("[mine]\n" + GOOD.replace("= 60", f"= {limit}"), "limit_s must be above 0")
            for limit in ("0", "-1", "nan", "inf", "true", '"60"', "604801")
        ],
        ("[mine", "is not TOML"),
        ("#" * (2**20 + 1), "is larger than"),
    ],
)
def test_what_is_no_preset_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        read_presets([manifest(tmp_path, text)])
    assert "more.toml" in str(refused.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("absent", "bytes"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_presets([tmp_path / name])


def test_an_unknown_name_is_told_what_there_is() -> None:
    assert preset_named(read_presets(), "gpu").benchmark == "gpu"
    with pytest.raises(PresetNotFound, match=r"no preset '\\x1bgpu'; there are: agent"):
        preset_named(read_presets(), "\x1bgpu")

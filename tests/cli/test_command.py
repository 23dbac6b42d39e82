"""Settings of a verb: from flags, the environment and a file, and printed so that they can be read back."""

from pathlib import Path

import pytest

from support.programs import Run

pytestmark = pytest.mark.usefixtures("usual_logs")


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "kakeya.toml"
    file.write_text('window = 100\nsink = 10\nbind = "127.0.0.1:1"\nlog-format = "json"\n')
    monkeypatch.setenv("KAKEYA_WINDOW", "200")
    monkeypatch.setenv("KAKEYA_SINK", "20")
    outcome = run("serve", "--config", str(file), "--window", "300", "--print-config")
    given = outcome.settings()
    assert (given["window"], given["sink"], given["bind"]) == (300, 20, "127.0.0.1:1")
    assert (given["log-format"], given["max-concurrent-rpcs"]) == ("json", 1024)
    lines = outcome.out.splitlines()
    assert "window = 300  # flag" in lines
    assert "sink = 20  # environment" in lines
    assert 'bind = "127.0.0.1:1"  # file' in lines
    assert "max-concurrent-rpcs = 1024  # default" in lines
    assert "# capacity is not set" in lines


def test_what_is_printed_can_be_read_back(run: Run, tmp_path: Path) -> None:
    arguments = ("--numerics", "exact", "--insecure", "--keepalive-s", "7.5", "--capacity", "3")
    first = run("serve", *arguments, "--print-config")
    shown = [line for line in first.out.splitlines() if not line.startswith("print-config")]
    (tmp_path / "shown.toml").write_text("\n".join(shown))
    second = run("serve", "--config", str(tmp_path / "shown.toml"), "--print-config")
    expected = first.settings() | {"config": str(tmp_path / "shown.toml")}
    assert second.settings() == expected


def refusal(run: Run, *arguments: str) -> str:
    outcome = run("serve", *arguments)
    assert outcome.status == 2
    assert outcome.out == ""
    return outcome.err


@pytest.mark.parametrize(
    "content, words",
    [
        ("windw = 5", "there is no setting 'windw'"),
        ("[serve]\nwindow = 5", "there is no setting 'serve'"),
        ("config = 'x'", "there is no setting 'config'"),
        ("window = ", "cannot be read"),
    ],
)
def test_a_bad_file_is_named(run: Run, tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "bad.toml").write_text(content)
    said = refusal(run, "--config", str(tmp_path / "bad.toml"))
    assert "bad.toml" in said
    assert words in said


@pytest.mark.parametrize("content", ["window = 1.5", "window = true", 'window = "wide"', "window = [1, 2]"])
def test_a_value_of_the_wrong_kind_is_refused(run: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "bad.toml").write_text(content)
    assert "window" in refusal(run, "--config", str(tmp_path / "bad.toml"), "--print-config")


def test_underscores_and_lists_are_fine_in_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text('max_batch_tokens = 512\napi-key = ["one", "two"]\ninsecure = true\n')
    outcome = run("serve", "--config", str(tmp_path / "good.toml"), "--print-config")
    given = outcome.settings()
    assert (given["max-batch-tokens"], given["insecure"]) == (512, True)
    assert "# api-key is set by file, and not shown" in outcome.out

"""The settings of `kakeya bridge serve`; tests/cli/test_bridge.py runs it as a process."""

from pathlib import Path

import pytest

from kakeya.cli.bridge_serve import BridgeOptions, _banner, _loader
from kakeya.metrics import BridgeMetrics
from support.programs import Run


def test_every_flag_has_an_environment_twin(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_KEEP_RUNS", "7")
    monkeypatch.setenv("KAKEYA_API_KEY", "a-secret")
    outcome = run("bridge", "serve", "--print-config")
    settings = outcome.settings()
    assert (settings["keep-runs"], settings["bind"]) == (7, "127.0.0.1:50071")
    assert "a-secret" not in outcome.out


def test_runs_are_kept_in_the_users_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    runs = _loader(BridgeOptions())(BridgeMetrics())
    assert runs.directory.is_relative_to(tmp_path)
    assert runs.directory.name == "bridge"
    lines = list(_banner(runs, "here:1", "nobody", "http://here:2/metrics"))
    assert lines[0].endswith("bridges benchmarks on here:1")
    assert "gpu-quick" in lines[1]
    assert lines[-1].endswith("http://here:2/metrics")
    runs.close()

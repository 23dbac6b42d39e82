"""The workflows in .github: which labels a change gets, and that they name things which exist.

`make check` lints them with actionlint and zizmor.
"""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kakeya.config import DEFAULT_MODEL
from kakeya.models import store
from kakeya.models.catalogue import CATALOGUE

ROOT = Path(__file__).parents[1]
WORKFLOWS = {path.stem: path for path in sorted((ROOT / ".github/workflows").glob("*.yaml"))}
RULES = yaml.safe_load((ROOT / ".github/labeler.yml").read_text())


def globs(label: str) -> list[str]:
    """The globs of a label, which all have the one form that we use."""
    ((rule,),) = [each["changed-files"] for each in RULES[label]]
    wanted = rule["any-glob-to-any-file"]
    return [wanted] if isinstance(wanted, str) else wanted


def matches(glob: str, path: str) -> bool:
    """As minimatch does with `dot`, for the globs that we use: `*` within a name, `/**` at the end."""
    assert re.fullmatch(r"[\w./*-]+", glob), glob
    assert "**" not in glob.removesuffix("/**"), glob
    plain, deep = glob.removesuffix("/**"), glob.endswith("/**")
    pattern = re.escape(plain).replace(r"\*", "[^/]*") + ("/.+" if deep else "")
    return re.fullmatch(pattern, path) is not None


def labels_of(paths: list[str]) -> set[str]:
    return {label for label in RULES if any(matches(glob, path) for glob in globs(label) for path in paths)}


@pytest.mark.parametrize(
    "paths, labels",
    [
        (["README.md"], {"documentation"}),
        (["docs/adr/0001-native-kernels.md", "tests/test_types.py"], {"documentation"}),
        (["tests/support/tiny.py"], set()),
        (["src/kakeya/client/session.py", "src/kakeya/cli/chat.py"], set()),
        (["src/kakeya/kernels/src/lanes_neon.h"], {"needs-mac-m4"}),
        (["src/kakeya/kernels/native.py", "CHANGELOG.md"], {"needs-mac-m4", "documentation"}),
        (["src/kakeya/models/decoder.py"], {"needs-mac-m4"}),
        (["src/kakeya/engine/mlx/backend.py"], {"needs-mac-m4"}),
        (["src/kakeya/engine/cpu/sampler.py"], {"needs-mac-m4"}),
        (["src/kakeya/engine/scheduler.py"], {"needs-mac-m4", "needs-gpu"}),
        (["src/kakeya/engine/cuda/graphs.py"], {"needs-gpu"}),
        (["src/kakeya/kernels/gpu/device/sampling.py"], {"needs-gpu"}),
        (["proto/kakeya/v1/runtime.proto"], {"wire-contract"}),
        (["sdks/typescript/src/wire/kakeya/v1/runtime_pb.ts"], {"wire-contract", "typescript"}),
        (["constraints.txt"], {"needs-mac-m4", "packaging"}),
        (["deploy/grafana/dashboards/kakeya.json", "Dockerfile"], {"packaging"}),
        ([".github/workflows/gpu.yaml"], {"needs-gpu", "ci"}),
        (["sdks/typescript/README.md"], {"typescript"}),
        ([], set()),
    ],
)
def test_labels_of_a_change(paths: list[str], labels: set[str]) -> None:
    assert labels_of(paths) == labels


def test_every_rule_is_about_something() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    files = listed.stdout.splitlines() or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*")]
    every = {glob for label in RULES for glob in globs(label)}
    assert [glob for glob in every if not any(matches(glob, file) for file in files)] == []


def test_workflows_wait_for_labels_that_are_given() -> None:
    waited_for = set(re.findall(r"needs-[\w-]+", "".join(path.read_text() for path in WORKFLOWS.values())))
    assert waited_for == {"needs-mac-m4", "needs-gpu"}
    assert waited_for <= set(RULES)


def test_the_workflows_are_those_that_the_docs_name() -> None:
    assert set(WORKFLOWS) == {"auto-label", "ci", "gpu", "integration", "release"}


def jobs(name: str) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(WORKFLOWS[name].read_text())["jobs"]


def steps() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in WORKFLOWS:
        for job in jobs(name).values():
            yield from ((name, step) for step in job["steps"])


def test_actions_are_pinned_by_digest() -> None:
    lines = [line for path in WORKFLOWS.values() for line in path.read_text().splitlines() if "uses:" in line]
    pins = {re.search(r"uses: ([\w/-]+)@([0-9a-f]{40}) # (v\d+\.\d+\.\d+)$", line) for line in lines}
    assert None not in pins
    # One version of an action everywhere.
    assert len({pin.groups() for pin in pins if pin}) == len({pin[1] for pin in pins if pin})


@pytest.mark.parametrize("name", WORKFLOWS)
def test_no_permission_that_a_job_does_not_ask_for(name: str) -> None:
    assert yaml.safe_load(WORKFLOWS[name].read_text())["permissions"] == {}
    writing = {
        (job, what)
        for job, each in jobs(name).items()
        for what, how in each.get("permissions", {}).items()
        if how == "write"
    }
    assert writing == {
        "auto-label": {("label", "pull-requests"), ("start", "actions")},
        "release": {
            ("attest", "id-token"),
            ("attest", "attestations"),
            ("publish", "id-token"),
            ("github", "contents"),
        },
    }.get(name, set())


def test_labelling_never_touches_foreign_code() -> None:
    used = [
        step["uses"].partition("@")[0] for name, step in steps() if name == "auto-label" and "uses" in step
    ]
    assert used == ["actions/labeler"]
    (ran,) = [step["run"] for name, step in steps() if name == "auto-label" and "run" in step]
    assert "${{" not in ran
    assert "git" not in ran.split()


def test_machines_of_our_own_run_no_forks() -> None:
    own = [job for name in WORKFLOWS for job in jobs(name).values() if "self-hosted" in job["runs-on"]]
    assert len(own) == 2
    for job in own:
        assert "head.repo.full_name == github.repository" in job["if"]
        assert job["environment"]
        assert job["concurrency"]["cancel-in-progress"] is True


def test_no_commit_on_main_ends_the_run_of_another() -> None:
    running = yaml.safe_load(WORKFLOWS["ci"].read_text())["concurrency"]
    assert running["group"] == "ci-${{ github.event_name == 'pull_request' && github.ref || github.sha }}"
    assert running["cancel-in-progress"] == "${{ github.event_name == 'pull_request' }}"


def test_the_sdk_is_tried_on_the_oldest_node_that_it_promises() -> None:
    described = json.loads((ROOT / "sdks/typescript/package.json").read_text())
    oldest, newest = jobs("ci")["typescript"]["strategy"]["matrix"]["node"]
    assert described["engines"]["node"].startswith(f">={oldest}.")
    assert newest == "lts/*"


def test_marked_tests_run_wherever_they_are() -> None:
    (ran,) = [step["run"] for step in jobs("gpu")["cuda"]["steps"] if "-m gpu" in step.get("run", "")]
    assert "tests/" not in ran


def test_commands_are_there() -> None:
    commands = "\n".join(step["run"] for _, step in steps() if "run" in step)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"^make (\w+)", commands, re.MULTILINE)) <= targets
    paths = set(re.findall(r"\b(?:scripts|tests)/[\w./-]+", commands))
    assert {"scripts/check_package.py", "tests/engine"} <= paths
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_cold_cache_fails_at_once_with_the_command_that_warms_it(tmp_path: Path) -> None:
    """The step of integration.yaml as it is, where the default model is and where it is not."""
    job = jobs("integration")["mac"]
    assert job["env"]["MODEL"] == DEFAULT_MODEL
    (look,) = [step["run"] for step in job["steps"] if "Look for the model" in step.get("name", "")]
    first = next(step for step in job["steps"] if "run" in step)
    assert first["run"] == look

    def ended() -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "MODEL": DEFAULT_MODEL, "KAKEYA_CACHE_DIR": str(tmp_path)}
        return subprocess.run(
            ["bash", "-e", "-c", look], env=environment, capture_output=True, text=True, check=False
        )

    cold = ended()
    assert cold.returncode == 1
    assert f"KAKEYA_CACHE_DIR={tmp_path} kakeya pull {DEFAULT_MODEL}" in cold.stdout
    model = tmp_path / CATALOGUE[DEFAULT_MODEL].source.path.relative_to(store.cache_dir())
    model.parent.mkdir(parents=True)
    model.touch()
    assert ended().returncode == 0

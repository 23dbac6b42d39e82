"""The tests run wherever they are started: in a script's background, under nohup, without a terminal."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from support.untraced import untraced_environment

TESTS = Path(__file__).parent
PRESSING_CTRL_C = (
    "cli/test_chat.py::test_ctrl_c_stops_the_answer_and_the_chat_goes_on",
    "models/test_wheel.py::test_an_interrupted_pull_leaves_nothing",
)


@pytest.mark.usefixtures("default_model")
def test_ctrl_c_is_noticed_though_the_shell_ignores_it(tmp_path: Path) -> None:
    output = tmp_path / "nohup.out"
    tests = [str(TESTS / name) for name in PRESSING_CTRL_C]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    with output.open("w") as out:
        done = subprocess.run(
            ["sh", "-c", 'trap "" INT QUIT HUP; exec "$0" "$@"', *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=TESTS.parent,
            env=untraced_environment(),
            check=False,
        )
    assert done.returncode == 0, output.read_text()


def test_garbage_is_searched_for_but_not_among_what_was_collected() -> None:
    """Tests that collect garbage themselves would look through half a million objects each time."""
    assert gc.isenabled()
    assert gc.get_freeze_count() > 100_000

import io
import sys

import pytest
from rich.console import Console

from kakeya.cli.console import FetchBar, Screen, human_bytes


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (24_053_760, "24.1 MB"),
        (1000, "1.0 kB"),
        (2e9, "2.0 GB"),
        (3e12, "3.0 TB"),
    ],
)
def test_sizes_for_reading(size: float, text: str) -> None:
    assert human_bytes(size) == text


def test_an_answer_cannot_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().answer("a\x1b[31mb\x07\tc\r\n\x9bd\x7fé")
    assert capsys.readouterr().out == "a[31mb\tc\ndé"


def test_notices_are_plain_where_nobody_sees_colours(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().notice("[bold]as it is[/bold] " + "long " * 100, style="red")
    captured = capsys.readouterr()
    assert captured.err == "[bold]as it is[/bold] " + "long " * 100 + "\n"
    assert captured.out == ""


def test_progress_in_a_pipe_is_a_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    with FetchBar(Screen()) as bar:
        for done in range(3):
            bar("fetching", done, 2)
        bar("checking", 1, None)
    assert capsys.readouterr().err == "fetching\nchecking\n"


def test_progress_on_a_terminal_is_a_bar_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    screen, terminal = Screen(), io.StringIO()
    screen.err = Console(file=terminal, force_terminal=True, width=100)
    with FetchBar(screen) as bar:
        bar("fetching", 500_000, 1_000_000)
        bar("fetching", 1_000_000, 1_000_000)
    shown = terminal.getvalue()
    assert "fetching" in shown
    assert "1.0/1.0 MB" in shown
    # The last thing written erases the bar's line and shows the cursor again.
    assert shown.rindex("\x1b[2K") > shown.rindex("fetching")
    assert "\x1b[?25h" in shown


def test_a_bar_that_never_started_leaves_no_trace(capsys: pytest.CaptureFixture[str]) -> None:
    with FetchBar(Screen()):
        pass
    assert capsys.readouterr().err == ""


def test_a_pipe_is_not_a_person(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert not screen.is_interactive


def test_what_an_earlier_fetch_left_says_nothing_of_the_rate() -> None:
    screen = Screen()
    screen.err = Console(file=io.StringIO(), force_terminal=True, width=100)
    with FetchBar(screen) as bar:
        bar("fetching", 900_000_000, 1_000_000_000)
        (task,) = bar._bars.tasks
        assert task.completed == 900_000_000
        assert not task.speed

"""The chat verb in this process, piped and with a person (played by a script) at the terminal."""

import builtins
import io
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console

from kakeya.cli.chat_loop import ChatLoop
from kakeya.cli.console import Screen
from kakeya.cli.conversation import Conversation
from kakeya.runtime import Runtime
from kakeya.types import SamplingParams
from support.programs import Run

pytestmark = pytest.mark.usefixtures("shared_runtime")

SHORT = ("--max-tokens", "8", "--seed", "1", "--temperature", "0")


@pytest.fixture(autouse=True)
def usual_signals() -> Iterator[None]:
    usual = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    assert signal.getsignal(signal.SIGINT) is usual[signal.SIGINT], "the chat gives Ctrl-C back"
    signal.signal(signal.SIGTERM, usual[signal.SIGTERM])


def test_piped_only_the_answers_are_on_stdout(run: Run) -> None:
    outcome = run("chat", *SHORT, stdin="Hello\n\nAnd you?\n")
    assert outcome.status == 0
    assert len(outcome.out.splitlines()) == 2
    assert "\033" not in outcome.out + outcome.err
    banner = outcome.err.splitlines()[:2]
    assert "parameters · weights" in banner[0]
    assert "· kernels " in banner[0]
    assert banner[1].startswith("remembers the first 24 and the last 104 tokens in ")
    assert "seed 1" in banner[1]
    assert outcome.err.count("(cut at --max-tokens 8)") == 2


def test_the_same_seed_gives_the_same_chat(run: Run) -> None:
    warm = ("chat", "--max-tokens", "12", "--temperature", "1.5", "--seed")
    first, again, other = (run(*warm, seed, stdin="Hello\n").out for seed in ("5", "5", "6"))
    assert first == again != other


def test_json_has_one_object_per_turn(run: Run) -> None:
    outcome = run("chat", "--json", *SHORT, stdin="Hello\nAnd you?\n")
    first, second = (json.loads(line) for line in outcome.out.splitlines())
    assert first["stop_reason"] == "MAX_TOKENS"
    assert first["completion_tokens"] == 8
    assert second["cached_tokens"] > 0
    assert second["session"]["history_length"] == sum(
        turn[key] for turn in (first, second) for key in ("prompt_tokens", "completion_tokens")
    )
    assert second["tokens_per_second"] > 0
    assert second["restarted"] is False


def test_the_system_message_is_pinned(run: Run) -> None:
    system = ("--system", "You are a pirate. Answer like one, with a parrot on your shoulder.")
    outcome = run("chat", "--json", *SHORT, *system, stdin="Hello\n")
    assert json.loads(outcome.out)["session"]["sink"] > 4
    long = run("chat", *SHORT, "--system", "Be brief. " * 60, stdin="")
    assert "only the first 64 are kept for ever" in long.err


def test_forgetting_is_announced_once(run: Run) -> None:
    outcome = run("chat", "--max-tokens", "40", stdin="Tell me a long story.\nMore.\nMore.\nMore.\n/info\n")
    assert outcome.status == 0
    assert outcome.err.count("outgrown its memory of 128 tokens") == 1
    assert "the first 24 stay" in outcome.err


def test_commands_work_piped_and_write_nothing_to_stdout(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a chat"
    lines = ["/help", "/info", "Hello", "/info", f"/save {path}", "/reset", "/info", f"/load {path}", "/info"]
    outcome = run("chat", *SHORT, stdin="\n".join([*lines, "/exit", "never asked"]))
    assert outcome.status == 0
    assert len(outcome.out.splitlines()) == 1
    assert "/save PATH" in outcome.err
    histories = [line.split()[1] for line in outcome.err.splitlines() if line.startswith("history")]
    assert histories[0] == histories[2] == "0"
    assert histories[1] == histories[3] != "0"
    assert outcome.err.count("tokens/s") == 1
    assert "(a new chat)" in outcome.err
    assert f"(saved to {path})" in outcome.err
    assert f"(going on with {path}: {histories[1]} tokens)" in outcome.err


def test_a_space_before_a_slash_makes_it_text(run: Run) -> None:
    assert run("chat", *SHORT, stdin=" /info is a word\n").out.strip()


@pytest.mark.parametrize(
    "line, message",
    [
        ("/nothing", "no command /nothing; the commands are /info, /recalled, /reset"),
        ("/save", "/save needs a path"),
        ("/load", "/load needs a path"),
        ("/load /no/such/file", "/no/such/file cannot be read as session state"),
        ("/save /no/such/folder/file", "cannot write session state"),
        ("\udcff", "lone surrogates"),
    ],
)
def test_piped_the_first_error_ends_it(run: Run, line: str, message: str) -> None:
    outcome = run("chat", *SHORT, stdin=f"{line}\nHello\n")
    assert outcome.status == 1
    assert outcome.out == ""
    assert message in outcome.err.splitlines()[-1]


class Person:
    """Types lines at the prompt, then Ctrl-D; an exception among them is raised there."""

    def __init__(self, *acts: str | BaseException) -> None:
        self._acts = iter(acts)
        self.prompts: list[str] = []

    def __call__(self, prompt: str = "") -> str:
        self.prompts.append(prompt)
        act = next(self._acts, EOFError())
        if isinstance(act, BaseException):
            raise act
        return act


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Screen:
    screen = Screen()
    screen.out = Console(file=io.StringIO(), force_terminal=True, highlight=False)
    screen.err = Console(file=io.StringIO(), force_terminal=True, highlight=False, soft_wrap=True)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    return screen


Talk = Callable[[Person], tuple[str, str]]


@pytest.fixture
def talk(terminal: Screen, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> Talk:
    def talk(person: Person, max_tokens: int = 8) -> tuple[str, str]:
        monkeypatch.setattr(builtins, "input", person)
        with runtime:
            conversation = Conversation.begin(runtime, SamplingParams(), max_tokens)
            ChatLoop(terminal, conversation, runtime.describe()).run(seed=0)
        assert isinstance(terminal.out.file, io.StringIO)
        assert isinstance(terminal.err.file, io.StringIO)
        return terminal.out.file.getvalue(), terminal.err.file.getvalue()

    return talk


def test_errors_are_shown_and_the_chat_goes_on(talk: Talk) -> None:
    out, err = talk(Person("/nothing", "/load /no/such/file", "Hello"))
    assert "error: no command /nothing" in err
    assert "error: /no/such/file cannot be read" in err
    assert len(out.split()) > 2


def test_ctrl_c_at_the_prompt_tells_how_to_leave(talk: Talk) -> None:
    person = Person(KeyboardInterrupt(), "/quit", "never asked")
    _, err = talk(person)
    assert "Ctrl-D or /exit leaves." in err
    assert len(person.prompts) == 2
    assert "you › " in person.prompts[0]


def test_the_prompt_has_no_colour_where_none_is_wanted(talk: Talk, terminal: Screen) -> None:
    terminal.out.no_color = True
    person = Person()
    talk(person)
    assert person.prompts == ["you › "]


def test_without_readline_the_prompt_still_works(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "readline", None)
    out, _ = talk(Person("Hello"))
    assert out.strip()


def test_ctrl_c_stops_the_answer_and_keeps_the_chat(
    talk: Talk, terminal: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = terminal.answer
    pieces: list[str] = []

    def interrupted(piece: str) -> None:
        usual(piece)
        pieces.append(piece)
        if len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)

    monkeypatch.setattr(terminal, "answer", interrupted)
    _, err = talk(Person("Count from one to one hundred in words.", "Hello", "/info"), max_tokens=100)
    assert err.count("(stopped; the chat goes on from here)") == 1
    assert "history" in err
    assert len(pieces) > 6


def test_a_second_ctrl_c_leaves(talk: Talk, terminal: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Conversation, "cancel", lambda self: None)

    def impatient(piece: str) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(terminal, "answer", impatient)
    with pytest.raises(KeyboardInterrupt):
        talk(Person("Count from one to one hundred in words."), max_tokens=100)


def test_a_restart_is_announced(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Conversation, "last_turn_restarted", property(lambda self: True, lambda self, v: None), False
    )
    _, err = talk(Person("Hello"))
    assert "template rewrites earlier turns" in err

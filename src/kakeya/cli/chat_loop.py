"""The terminal side of a chat: reads lines, shows answers, obeys the slash commands."""

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from rich.table import Table

from kakeya.cli.console import Screen, human_bytes
from kakeya.cli.conversation import Conversation
from kakeya.errors import InvalidArgument, KakeyaError
from kakeya.types import RuntimeFacts, StopReason

_PROMPT = "you › "
# The marks tell readline that what they enclose takes no room on the line.
_COLOURED_PROMPT = f"\001\033[1;36m\002{_PROMPT}\001\033[0m\002"
_HELP = """\
/info         what the session holds, and how fast the last answer came
/recalled     what the last answer saw again of what had left the window
/reset        begin again
/save PATH    write the chat, its memory included, to a file
/load PATH    go on with a saved chat
/help         this list
/exit         leave (so does Ctrl-D); Ctrl-C stops an answer and keeps the chat
A line that should begin with a slash: put a space before it."""


class ChatLoop:
    """Runs a conversation on a screen. With a person at it, errors are shown and the chat goes on;
    in a pipe the first error ends it."""

    def __init__(
        self, screen: Screen, conversation: Conversation, facts: RuntimeFacts, *, as_json: bool = False
    ) -> None:
        self._screen = screen
        self._conversation = conversation
        self._facts = facts
        self._as_json = as_json
        self._told_of_dropping = False
        self._commands: dict[str, Callable[[str], None]] = {
            "/info": self._info,
            "/recalled": self._recalled,
            "/reset": self._reset,
            "/save": self._save,
            "/load": self._load,
            "/help": self._help,
        }

    def run(self, seed: int) -> None:
        """Greet, then take turns until the input ends or asks to."""
        self._banner(seed)
        for line in self._lines():
            text = line.strip()
            if text in ("/exit", "/quit"):
                return
            if text:
                self._obey(line.rstrip("\n") if line.startswith(" ") else text)

    def _obey(self, text: str) -> None:
        try:
            if text.startswith("/"):
                self._command(text)
            else:
                self._turn(text.strip())
        except KakeyaError as error:
            if not self._screen.is_interactive:
                raise
            self._screen.notice(f"error: {error}", style="red")

    # Reading.

    def _lines(self) -> Iterator[str]:
        return self._typed_lines() if self._screen.is_interactive else iter(sys.stdin)

    def _typed_lines(self) -> Iterator[str]:
        _enable_line_editing()
        prompt = _PROMPT if self._screen.out.no_color else _COLOURED_PROMPT
        while True:
            try:
                yield input(prompt)
            except KeyboardInterrupt:
                self._screen.line()
                self._screen.notice("Ctrl-D or /exit leaves.")
            except EOFError:
                self._screen.line()
                return

    # Turns.

    def _turn(self, text: str) -> None:
        with self._interrupt_stops_answer():
            for piece in self._conversation.ask(text):
                if not self._as_json:
                    self._screen.answer(piece)
        self._screen.line(self._turn_as_json() if self._as_json else "")
        self._remark()

    def _turn_as_json(self) -> str:
        report = self._conversation.last_report
        assert report is not None, "a turn that did not fail has a report"
        return json.dumps(
            {
                **asdict(report),
                "tokens_per_second": report.tokens_per_second,
                "restarted": self._conversation.last_turn_restarted,
                "session": asdict(self._conversation.info()),
            }
        )

    def _remark(self) -> None:
        """Say what the answer itself does not show."""
        conversation, notice = self._conversation, self._screen.notice
        report = conversation.last_report
        if report is not None and report.stop_reason is StopReason.CANCELLED:
            notice("(stopped; the chat goes on from here)")
        elif report is not None and report.stop_reason is StopReason.MAX_TOKENS:
            notice(f"(cut at --max-tokens {report.completion_tokens})")
        if conversation.last_turn_restarted:
            notice("(this model's template rewrites earlier turns, so the whole chat was computed again)")
        self._remark_on_dropping()

    def _remark_on_dropping(self) -> None:
        info = self._conversation.info()
        if info.dropped_token_count > 0 and not self._told_of_dropping:
            self._told_of_dropping = True
            then = f"the oldest are being forgotten, the first {info.sink} stay; /info counts them"
            if info.recall_tokens:
                then = "the oldest are looked up where they matter; /recalled shows what was found"
            size = info.sink + info.recall_tokens + info.window
            self._screen.notice(f"(the chat has outgrown its memory of {size:,} tokens: {then})")

    @contextmanager
    def _interrupt_stops_answer(self) -> Iterator[None]:
        """While a person waits for an answer, the first Ctrl-C stops it; a second one leaves."""
        if not self._screen.is_interactive:
            yield
            return

        def stop(signum: int, frame: FrameType | None) -> None:
            signal.signal(signal.SIGINT, usual)
            # From a thread of its own: this one may hold the very lock that cancelling takes.
            threading.Thread(target=self._conversation.cancel, daemon=True).start()

        usual = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, usual)

    # Commands.

    def _command(self, text: str) -> None:
        name, _, argument = text.partition(" ")
        command = self._commands.get(name)
        if command is None:
            raise InvalidArgument(f"no command {name}; the commands are {', '.join(self._commands)}, /exit")
        command(argument.strip())

    def _help(self, argument: str) -> None:
        self._screen.notice(_HELP)

    def _reset(self, argument: str) -> None:
        self._conversation.reset()
        self._told_of_dropping = False
        self._screen.notice("(a new chat)")

    def _save(self, argument: str) -> None:
        self._conversation.save(_path_of("/save", argument))
        self._screen.notice(f"(saved to {argument})")

    def _load(self, argument: str) -> None:
        self._conversation.load(_path_of("/load", argument))
        self._told_of_dropping = False
        self._screen.notice(
            f"(going on with {argument}: {self._conversation.info().history_length:,} tokens)"
        )

    def _recalled(self, argument: str) -> None:
        found = self._conversation.recalled()
        for each, text in found.items():
            self._screen.notice(f"tokens {each.start:,} to {each.end:,}", style="bold")
            self._screen.notice(text.strip())
        if not found:
            self._screen.notice("(nothing that left the window was seen again)")

    def _info(self, argument: str) -> None:
        table = Table(box=None, show_header=False, pad_edge=False)
        for name, value in self._info_rows():
            table.add_row(name, value)
        self._screen.err.print(table, style="dim")

    def _info_rows(self) -> list[tuple[str, str]]:
        info, report = self._conversation.info(), self._conversation.last_report
        rows = [
            ("history", f"{info.history_length:,} tokens"),
            ("KV memory", f"{info.kv_live_bytes:,} of {info.kv_capacity_bytes:,} bytes"),
            ("remembers", f"first {info.sink} and last {info.window:,} tokens"),
            ("dropped", f"{info.dropped_token_count:,} tokens"),
        ]
        if info.recall_tokens:
            seen = sum(each.length for each in info.recalled)
            took = f"in {info.recall_duration_seconds:.3f} s; /recalled shows them"
            rows.append(("recalled", f"{seen} of at most {info.recall_tokens} tokens, {took}"))
        if report is not None:
            speed, first = report.tokens_per_second, report.time_to_first_token_seconds
            rows += [
                ("last answer", f"{report.completion_tokens} tokens to {report.prompt_tokens} new ones"),
                ("speed", "–" if speed is None else f"{speed:.1f} tokens/s"),
                ("first token", "–" if first is None else f"after {first:.3f} s"),
            ]
        return rows

    def _banner(self, seed: int) -> None:
        facts, info, notice = self._facts, self._conversation.info(), self._screen.notice
        recalls = f"and recalls up to {info.recall_tokens:,} others " if info.recall_tokens else ""
        notice(
            f"{facts.model} · {facts.parameters / 1e6:,.0f}M parameters · weights {facts.weights} · "
            f"{facts.dtype} · kernels {facts.kernels} · {facts.threads} threads"
        )
        notice(
            f"remembers the first {info.sink:,} and the last {info.window:,} tokens "
            f"{recalls}in {human_bytes(facts.session_bytes)} per session · seed {seed} · /help"
        )
        opening = self._conversation.opening_tokens
        if opening > info.sink:
            notice(
                f"the system message has {opening:,} tokens with its frame; only the first {info.sink:,} "
                "are kept for ever (half of what is remembered)",
                style="yellow",
            )


def _path_of(command: str, argument: str) -> Path:
    if not argument:
        raise InvalidArgument(f"{command} needs a path: {command} PATH")
    return Path(argument)


def _enable_line_editing() -> None:
    try:
        import readline  # noqa: F401 - importing it is what changes input()
    except ImportError:
        pass

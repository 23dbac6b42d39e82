"""`kakeya` itself: its verbs and their help, wrong usage in one line, odd bytes."""

import io
import signal
import sys
from pathlib import Path

import pytest

import kakeya
from kakeya.cli import VERBS, main
from kakeya.errors import DownloadFailed
from kakeya.models import catalogue
from support.programs import Run, processor_seconds


def test_help_lists_every_verb(run: Run) -> None:
    outcome = run("--help")
    assert outcome.status == 0
    assert all(f" {verb} " in outcome.out for verb in VERBS)


def test_no_arguments_show_help(run: Run) -> None:
    outcome = run()
    assert outcome.status == 2
    assert "Usage: kakeya" in outcome.out + outcome.err


def test_version(run: Run) -> None:
    assert run("--version").out == f"kakeya {kakeya.__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(run: Run, verb: str) -> None:
    outcome = run(verb, "--help")
    assert outcome.status == 0
    assert f"Usage: kakeya {verb}" in outcome.out


def test_help_is_quick_and_light() -> None:
    program = (
        "import sys\nfrom kakeya.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'gguf', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    # About half a second where nothing else runs; a shared core is slower.
    assert min(processor_seconds(program) for _ in range(3)) < 1.5


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(run: Run, monkeypatch: pytest.MonkeyPatch, shell: str) -> None:
    # Otherwise it looks for the shell that started this process.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    outcome = run("--show-completion", shell)
    assert outcome.status == 0
    assert f"_KAKEYA_COMPLETE=complete_{shell}" in outcome.out


def test_completion_knows_verbs_and_flags(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_KAKEYA_COMPLETE", "complete_bash")
    for words, completed in (("kakeya se", {"serve", "sessions"}), ("kakeya doctor --js", {"--json"})):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
        assert set(run().out.split()) == completed


def test_an_unknown_verb_is_wrong_usage(run: Run) -> None:
    outcome = run("frobnicate")
    assert outcome.status == 2
    assert "No such command" in outcome.err


@pytest.mark.parametrize("verb", ["chat", "generate"])
@pytest.mark.parametrize(
    "option, value, message",
    [
        ("--window", "0", "window must be a whole number from 1"),
        ("--sink", "-1", "sink must be a whole number from 0"),
        ("--threads", "0", "threads must be a whole number from 1"),
        ("--backend", "cuda", "there is no CUDA device"),
        ("--temperature", "-1", "temperature must be in [0.0"),
        ("--temperature", "nan", "temperature must be a number"),
        ("--top-p", "0", "top_p must be in (0.0"),
        ("--top-k", "-3", "top_k must be in [0"),
        ("--min-p", "2", "min_p must be in [0.0"),
        ("--repetition-penalty", "0", "repetition_penalty must be in [0.01"),
        ("--seed", "-1", "seed must be in [0"),
        ("--max-tokens", "0", "max-tokens must be at least 1"),
    ],
)
def test_a_bad_setting_is_wrong_usage_in_one_line(
    run: Run, verb: str, option: str, value: str, message: str
) -> None:
    outcome = run(verb, option, value, *(["hello"] if verb == "generate" else []))
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err.startswith("kakeya: ")
    assert outcome.err.count("\n") == 1
    assert message in outcome.err


@pytest.mark.parametrize("option", ["--dtype", "--weights", "--numerics", "--kernels", "--backend"])
def test_a_choice_that_is_none_is_wrong_usage(run: Run, option: str) -> None:
    outcome = run("chat", option, "float7")
    assert outcome.status == 2
    assert "float7" in outcome.err


def test_an_unknown_model_is_one_line(run: Run) -> None:
    outcome = run("chat", "--model", "nope")
    assert outcome.status == 1
    assert outcome.err.startswith("kakeya: no model 'nope'")
    assert outcome.err.count("\n") == 1


def test_a_file_that_is_no_model_is_one_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF and then nothing")
    outcome = run("generate", "hello", "--model", str(tmp_path / "bad.gguf"))
    assert outcome.status == 1
    assert outcome.err.startswith("kakeya: ")
    assert outcome.err.count("\n") == 1


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAKEYA_DEBUG", "1")
    with pytest.raises(DownloadFailed):
        monkeypatch.setattr(catalogue, "pull", _broken_pull)
        main(["pull"])


def _broken_pull(*_: object) -> Path:
    raise DownloadFailed("broken on purpose")


def test_arguments_come_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["kakeya", "--version"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().out.startswith("kakeya ")


def test_odd_bytes_raise_nothing_at_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"\xff\n"), encoding="utf-8")
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdin", stdin)
    monkeypatch.setattr(sys, "stdout", stdout)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert stdin.read() == "\udcff\n"
    stdout.write("ü")
    stdout.flush()


@pytest.fixture(autouse=True)
def usual_sigterm() -> object:
    """`main` takes over SIGTERM; give it back."""
    usual = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, usual)

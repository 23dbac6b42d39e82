import json

import pytest

from kakeya.runtime import Runtime
from kakeya.text import Tokenizer
from kakeya.types import TokenizerFiles
from support.programs import Run

pytestmark = pytest.mark.usefixtures("shared_runtime")


def test_a_prompt_is_answered_on_stdout_alone(run: Run) -> None:
    outcome = run("generate", "What is 2+2?")
    assert outcome.status == 0
    assert "4" in outcome.out
    assert outcome.out.endswith("\n")
    assert outcome.err == ""


def test_raw_continues_the_text(run: Run) -> None:
    outcome = run("generate", "1, 2, 3, 4, 5,", "--raw", "--max-tokens", "2")
    assert "6" in outcome.out


def test_the_prompt_may_come_from_stdin(run: Run) -> None:
    arguments = ("--json", "--max-tokens", "4")
    piped = json.loads(run("generate", "-", *arguments, stdin="What is 2+2?\n").out)
    given = json.loads(run("generate", "What is 2+2?", *arguments).out)
    assert piped["text"] == given["text"]
    assert piped["prompt_tokens"] == given["prompt_tokens"]


def test_json_says_how_it_went(run: Run) -> None:
    answer = json.loads(run("generate", "Hello", "--json", "--max-tokens", "4", "--seed", "9").out)
    assert answer["completion_tokens"] == 4
    assert answer["stop_reason"] == "MAX_TOKENS"
    assert answer["seed"] == 9
    assert answer["dropped_tokens"] == 0
    assert answer["tokens_per_second"] > 0


def test_one_token_has_no_speed(run: Run) -> None:
    assert (
        json.loads(run("generate", "Hello", "--json", "--max-tokens", "1").out)["tokens_per_second"] is None
    )


def test_a_prompt_beyond_the_memory_is_answered_and_counted(run: Run) -> None:
    outcome = run("generate", "word " * 300, "--json", "--max-tokens", "4")
    assert json.loads(outcome.out)["dropped_tokens"] > 150


def test_the_system_message_is_used(run: Run) -> None:
    with_system = json.loads(
        run("generate", "Hello", "--system", "Be brief.", "--json", "--max-tokens", "1").out
    )
    without = json.loads(run("generate", "Hello", "--json", "--max-tokens", "1").out)
    assert with_system["prompt_tokens"] != without["prompt_tokens"]


@pytest.mark.parametrize("arguments", [("",), ("-",), ("", "--raw")])
def test_an_empty_prompt_is_refused(run: Run, arguments: tuple[str, ...]) -> None:
    outcome = run("generate", *arguments)
    assert outcome.status == 1
    assert outcome.err == "kakeya: the prompt is empty; give some text, or - with text on stdin\n"


def test_a_model_without_a_template_needs_raw(
    run: Run, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = Tokenizer(TokenizerFiles(runtime.tokenizer.files.tokenizer_json))
    monkeypatch.setattr(runtime, "tokenizer", bare)
    outcome = run("generate", "Hello")
    assert outcome.status == 1
    assert "use --raw" in outcome.err
    assert run("generate", "Hello", "--raw", "--max-tokens", "2").status == 0

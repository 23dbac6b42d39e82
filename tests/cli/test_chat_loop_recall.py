"""A chat that has outgrown its window says what it looked up."""

import io
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest

from kakeya.cli.chat_loop import ChatLoop
from kakeya.cli.console import Screen
from kakeya.cli.conversation import Conversation
from kakeya.runtime import Runtime
from kakeya.types import SamplingParams
from support.serving import ENGINE, write_model

LONG = "hello world. " * 12 + "quick brown fox. " + "hello world. " * 120


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    config = replace(ENGINE, cache=replace(ENGINE.cache, window=60, recall=80))
    with Runtime.open(str(write_model(tmp_path_factory.mktemp("model"))), config) as runtime:
        yield runtime


def shown(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *lines: str
) -> str:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    conversation = Conversation.begin(runtime, SamplingParams(), max_tokens=8)
    ChatLoop(Screen(), conversation, runtime.describe()).run(seed=0)
    return capsys.readouterr().err.replace("\n", " ")


def test_what_was_recalled_is_shown(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ("/recalled", LONG, "quick brown fox", "/info", "/recalled")
    err = shown(runtime, monkeypatch, capsys, *lines)
    assert "and recalls up to 80 others" in err
    assert "(nothing that left the window was seen again)" in err
    assert "the oldest are looked up where they matter; /recalled shows what was found" in err
    assert "of at most 80 tokens" in err
    assert "quick brown fox." in err.split("tokens/s")[-1]

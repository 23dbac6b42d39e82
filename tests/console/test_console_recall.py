"""What a conversation's window has lost and a turn saw again, under its answer and in the table."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from support.browser import Console, console
from support.http_clients import ENGINE
from support.http_serving import serving_http

LONG = "hello world. " * 12 + "quick brown fox. " + "hello world. " * 120


@pytest.fixture
def recalling(browser: Browser, model: Path) -> Iterator[Console]:
    engine = replace(ENGINE, cache=replace(ENGINE.cache, window=60, recall=80))
    with serving_http(model, engine=engine) as (server, _), console(browser, server.url) as page:
        yield page


def test_what_was_seen_again_unfolds_under_the_answer(recalling: Console) -> None:
    recalling.turn("hello")
    pieces = recalling.answers.first.locator(".recalled")
    expect(pieces).to_have_count(0)

    recalling.turn(LONG)
    recalling.turn("quick brown fox")
    remembered = recalling.answers.nth(2).locator(".recalled")
    title = remembered.locator("summary")
    expect(title).to_have_text(re.compile(r"^remembered \d+ tokens from earlier$"))
    text = remembered.locator("blockquote").filter(has_text="quick brown fox.")
    expect(text).to_be_hidden()
    title.click()
    expect(text).to_be_visible()

    tokens = re.sub(r"\D", "", title.text_content() or "")
    assert 0 < int(tokens) <= 80
    expect(recalling.cell(0, "Recalled")).to_have_text(tokens)

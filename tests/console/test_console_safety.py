"""Keys, markup that must stay text, and a server that is not there."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Route, expect

from kakeya.http_server import HttpServer
from kakeya.runtime import Runtime
from kakeya.serving.config import HttpConfig
from kakeya.serving.keys import hash_key
from support import serving
from support.browser import Console, console
from support.http_serving import serving_http, start

MARKUP = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
KEY, OTHER = "a-good-key", "another-key"


@pytest.fixture(scope="module")
def locked(model: Path) -> Iterator[HttpServer]:
    config = HttpConfig(bind="127.0.0.1:0", key_hashes=(hash_key(KEY), hash_key(OTHER)))
    with serving_http(model, config, replace(serving.ENGINE, capacity=8)) as (server, _):
        yield server


def give(page: Console, key: str) -> None:
    page.page.get_by_label("API key").fill(key)
    page.page.get_by_role("button", name="Use this key").click()


def test_a_key_is_asked_for_and_a_wrong_one_is_refused(browser: Browser, locked: HttpServer) -> None:
    with console(browser, locked.url) as page:
        dialog = page.page.get_by_role("dialog")
        expect(dialog).to_contain_text("This server needs a key")
        expect(page.page.get_by_label("API key")).to_be_focused()
        give(page, "not-the-key")
        expect(dialog).to_contain_text("The server does not know this key.")
        give(page, "no key at all")
        expect(dialog).to_contain_text("printable ASCII without spaces")
        give(page, KEY)
        expect(dialog).to_be_hidden()
        page.turn("with a key")
        expect(page.rows).not_to_have_count(0)
        stored = page.page.evaluate("[JSON.stringify(localStorage), document.cookie]")
        assert KEY not in "".join(stored)
        page.page.reload()
        expect(page.talks).to_have_count(1)
        expect(dialog).to_be_hidden()


def test_what_one_key_said_another_does_not_see(browser: Browser, locked: HttpServer) -> None:
    with console(browser, locked.url) as page:
        give(page, KEY)
        page.turn("a secret of the first")
        page.button("Forget key").click()
        give(page, OTHER)
        expect(page.page.locator("#sessions-empty")).to_be_visible()
        expect(page.talks).to_have_count(0)
        expect(page.rows).to_have_count(0)
        assert "a secret" not in page.page.content()


def test_who_declines_is_asked_again_only_on_request(browser: Browser, locked: HttpServer) -> None:
    with console(browser, locked.url) as page:
        give(page, "not-the-key")
        expect(page.page.get_by_role("dialog")).to_contain_text("does not know this key")
        page.page.keyboard.press("Escape")
        expect(page.page.locator("#notice")).to_contain_text("This server needs a key")
        page.page.wait_for_timeout(500)
        expect(page.page.get_by_role("dialog")).to_be_hidden()
        page.button("Enter key").click()
        give(page, KEY)
        expect(page.page.locator("#notice")).to_be_hidden()


def test_markup_of_users_titles_labels_and_stored_answers_stays_text(
    page: Console, url: str, runtime: Runtime
) -> None:
    label = runtime.create_session(client_label=MARKUP)
    said = [{"role": "user", "content": MARKUP}, {"role": "assistant", "content": MARKUP}]
    made = httpx.post(f"{url}/v1/conversations", json={"items": said}, trust_env=False)
    made.raise_for_status()
    page.turn(MARKUP)
    expect(page.questions.first).to_have_text(MARKUP)
    expect(page.rows.filter(has_text="<img src=x")).not_to_have_count(0)
    page.page.reload()
    page.talks.last.click()
    expect(page.questions.first).to_have_text(MARKUP)
    expect(page.answers.first.locator(".said")).to_have_text(MARKUP)
    expect(page.page.locator("#talk-title")).to_contain_text("<img src=x")
    assert page.page.locator("img, #log script, [onerror]").count() == 0
    expect(page.page).to_have_title("Kakeya console")
    runtime.close_session(label)


def test_markup_in_a_stream_or_an_error_stays_text(page: Console) -> None:
    deltas = [{"type": "response.output_text.delta", "delta": part} for part in (MARKUP[:9], MARKUP[9:])]
    failure = {"type": "response.failed", "response": {"error": {"message": MARKUP}}}
    stream = "".join(f"data: {json.dumps(event)}\r\n\r\n" for event in (*deltas, failure))

    def answer(route: Route) -> None:
        route.fulfill(body=stream, content_type="text/event-stream")

    def refuse(route: Route) -> None:
        route.fulfill(status=400, json={"error": {"message": MARKUP}})

    page.page.route("**/v1/responses", answer)
    page.turn("anything")
    assert page.said(0) == MARKUP
    expect(page.answers.first.locator(".about")).to_have_text(MARKUP)
    page.page.unroute("**/v1/responses")
    page.page.route("**/v1/responses", refuse)
    page.ask("anything else")
    expect(page.page.locator(".messages > .error")).to_have_text(MARKUP)
    assert page.page.locator("img, #log script").count() == 0
    expect(page.page).to_have_title("Kakeya console")


def test_nothing_can_turn_text_into_markup_later(page: Console) -> None:
    """The browser itself forbids it: a future slip breaks instead of running what a model wrote."""
    refused = page.page.evaluate(
        """() => new Promise((resolve) => {
          addEventListener('securitypolicyviolation', (event) => resolve(event.violatedDirective));
          try { document.querySelector('#log').innerHTML = '<b>x</b>'; resolve('accepted'); } catch { }
        })"""
    )
    assert refused == "require-trusted-types-for"
    page.page.evaluate("window.violations.splice(0)")


def test_a_broken_stream_says_so_and_keeps_what_came(page: Console) -> None:
    body = f"data: {json.dumps({'type': 'response.output_text.delta', 'delta': 'so far'})}\n\n"
    page.page.route("**/v1/responses", lambda route: route.fulfill(body=body))
    page.turn("anything")
    assert page.said(0) == "so far"
    expect(page.answers.first.locator(".about")).to_contain_text("The stream broke off.")


def test_a_server_that_loads_and_one_that_goes_away_are_told(browser: Browser, model: Path) -> None:
    server = start()
    with console(browser, server.url) as page:
        notice = page.page.locator("#notice")
        expect(notice).to_contain_text("the model is still loading")
        runtime = Runtime.open(str(model), serving.ENGINE)
        with page.page.expect_response(lambda answer: "/v1/conversations" in answer.url and answer.ok):
            serving.on_loop(server.open(runtime))
        expect(notice).to_be_hidden()
        expect(page.page.locator(".messages > .error")).to_have_count(0)
        expect(page.page.locator("#facts")).to_contain_text("window 2 + 30 tokens")
        serving.on_loop(server.drain(0))
        expect(notice).to_contain_text("cannot be reached")

"""Talking to a session in a real browser: streaming, stop, new, fork, going back, and what is refused."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Route, expect

from kakeya.runtime import Runtime
from support import serving
from support.browser import Console, console
from support.http_serving import eventually, serving_http


@pytest.fixture(autouse=True)
def _clean(url: str) -> Iterator[None]:
    """Each test finds a server without conversations."""
    yield
    with httpx.Client(base_url=url, trust_env=False) as client:
        for talk in client.get("/v1/conversations").json()["data"]:
            # What was stopped just now may rest only a moment later.
            eventually(lambda path=f"/v1/conversations/{talk['id']}": client.delete(path).is_success)


def test_an_answer_streams_and_can_be_stopped(wordy: Console) -> None:
    page = wordy
    page.ask("tell me everything")
    expect(page.questions).to_have_text(["tell me everything"])
    expect(page.answers.first).to_have_attribute("aria-busy", "true")
    for _ in range(3):
        page.growing(0)
    page.button("Stop").click()
    page.finished(0)
    expect(page.message).to_have_value("")


def test_a_whole_turn_tells_its_figures(page: Console) -> None:
    page.turn("hello")
    expect(page.answers.first.locator(".about")).to_contain_text("12 written at ")
    prompt, all_of_it = computed(page, 0)
    assert prompt == all_of_it
    page.turn("hello again")
    new, history = computed(page, 1)
    assert new < history == prompt + 12 + new - 1  # an answer's last token is computed with the next turn


def test_the_settings_are_used_and_remembered(page: Console, runtime: Runtime) -> None:
    page.set("Longest answer", "3")
    page.set("Instructions", "be brief")
    page.turn("hello")
    expect(page.answers.first.locator(".about")).to_contain_text(" 3 written at ")
    (info, *_), _ = runtime.list_sessions()
    assert info.sink > runtime.describe().sink  # the instructions are pinned
    page.page.reload()
    page.turn("hello")
    expect(page.answers.first.locator(".about")).to_contain_text(" 3 written at ")


def computed(page: Console, number: int) -> tuple[int, int]:
    """How many tokens of how many a turn has computed, as it says itself."""
    about = page.answers.nth(number).locator(".about").text_content() or ""
    found = re.search(r"(\d+) new of (\d+) tokens computed", about)
    assert found, about
    return int(found[1]), int(found[2])


def test_stop_keeps_the_partial_answer_and_the_talk_goes_on(wordy: Console) -> None:
    page = wordy
    page.ask("go on for ever")
    expect(page.answers.first.locator(".said")).not_to_be_empty()
    page.message.press("Escape")
    page.finished(0)
    expect(page.answers.first.locator(".about")).to_contain_text("kept as far as it came")
    shown = page.said(0)
    assert shown
    # The tab remembers it, a fork has it too, and the next message takes it to the server.
    page.page.reload()
    page.talks.first.click()
    expect(page.answers.locator(".said")).to_have_text([re.compile(".")])
    assert page.said(0) == shown
    page.button("Fork").click()
    expect(page.page.get_by_text("Forked here")).to_be_visible()
    assert page.said(0) == shown
    page.set("Longest answer", "12")
    page.turn("and now?")
    page.page.evaluate("sessionStorage.clear()")
    page.page.reload()
    page.talks.first.click()
    expect(page.questions).to_have_text(["go on for ever", "and now?"])
    assert page.said(0) == shown


def test_what_is_stopped_before_it_began_was_not_said(page: Console) -> None:
    page.page.route("**/v1/responses", lambda route: None)  # never answered
    page.ask("hurry up")
    page.button("Stop").click()
    expect(page.page.get_by_text("Stopped before anything came")).to_be_visible()
    expect(page.questions).to_have_count(0)
    expect(page.message).to_have_value("hurry up")
    page.page.unroute("**/v1/responses")
    page.message.press("Enter")
    page.finished(0)


def test_a_talk_that_is_still_busy_is_waited_for(page: Console) -> None:
    """A stopped answer ends on the server a moment after it ended here."""
    refusals = {"POST": 2, "DELETE": 2}

    def sometimes(route: Route) -> None:
        method = route.request.method
        if refusals.get(method, 0) > 0 and "/v1/conversations?" not in route.request.url:
            refusals[method] -= 1
            route.fulfill(status=409, json={"error": {"message": "it is being answered"}})
        else:
            route.continue_()

    page.page.route("**/v1/responses", sometimes)
    page.page.route("**/v1/conversations/*", sometimes)
    page.turn("patience")
    page.button("Delete").click()
    page.button("Really delete").click()
    expect(page.talks).to_have_count(0)
    assert refusals == {"POST": 0, "DELETE": 0}


def test_new_fork_and_going_back_keep_talks_apart(page: Console) -> None:
    first = page.turn("the first question")
    page.button("New conversation").click()
    expect(page.answers).to_have_count(0)
    expect(page.message).to_be_focused()
    page.turn("another matter")
    expect(page.talks).to_have_count(2)
    page.talks.filter(has_text="the first question").click()
    expect(page.questions).to_have_text(["the first question"])
    assert page.said(0) == first
    page.button("Fork").click()
    expect(page.page.get_by_text("Forked here")).to_be_visible()
    expect(page.talks).to_have_count(3)
    assert page.said(0) == first
    page.turn("only in the copy")
    expect(page.questions).to_have_text(["the first question", "only in the copy"])
    originals = page.talks.filter(has_text="the first question")
    expect(originals).to_have_count(2)
    originals.and_(page.page.locator(":not([aria-current])")).click()
    expect(page.questions).to_have_text(["the first question"])
    page.turn("only in the original")
    expect(page.questions).to_have_text(["the first question", "only in the original"])


def test_a_talk_keeps_its_button_where_the_list_is_ordered_anew(page: Console) -> None:
    """Or a click would open another one. Two homes of a cluster may order what began in one second so."""

    def backwards(route: Route) -> None:
        answer = route.fetch()
        listed = answer.json()
        route.fulfill(response=answer, json=listed | {"data": listed["data"][::-1]})

    page.turn("the first question")
    page.button("New conversation").click()
    page.turn("another matter")
    expect(page.talks).to_have_text([re.compile("another matter"), re.compile("the first question")])
    button = page.talks.filter(has_text="the first question").element_handle()
    page.page.route("**/v1/conversations?*", backwards)
    page.turn("and more of it")
    expect(page.talks).to_have_text([re.compile("the first question"), re.compile("another matter")])
    assert "the first question" in (button.text_content() or "")


def test_one_answer_is_written_while_another_talk_is_open(wordy: Console) -> None:
    page = wordy
    page.ask("a long story")
    expect(page.talks).to_have_text([re.compile("a long story")])
    page.growing(0)
    page.button("New conversation").click()
    expect(page.button("Send")).to_be_visible()
    page.set("Longest answer", "5")
    page.turn("meanwhile")
    page.talks.filter(has_text="a long story").click()
    expect(page.button("Stop")).to_be_visible()
    page.growing(0)
    page.button("Stop").click()
    page.finished(0)


def test_a_deleted_talk_frees_its_session(page: Console, runtime: Runtime) -> None:
    page.turn("not for long")
    assert runtime.list_sessions()[0]
    page.button("Delete").click()
    page.button("Really delete").click()
    expect(page.talks).to_have_count(0)
    expect(page.answers).to_have_count(0)
    assert runtime.list_sessions()[0] == []


def test_a_refused_message_goes_back_into_the_box(browser: Browser, model: Path) -> None:
    with (
        serving_http(model, engine=replace(serving.ENGINE, capacity=1)) as (server, runtime),
        console(browser, server.url) as page,
    ):
        runtime.create_session()
        page.ask("is there room?")
        expect(page.page.get_by_role("alert").filter(has_text="no free slab")).to_be_visible()
        expect(page.message).to_have_value("is there room?")
        expect(page.answers).to_have_count(0)
        expect(page.questions).to_have_count(0)
        (info,), _ = runtime.list_sessions()
        runtime.close_session(info.session_id)
        page.message.press("Enter")
        page.finished(0)


def test_a_message_is_sent_once_and_empty_ones_never(page: Console) -> None:
    page.ask("   ")
    expect(page.questions).to_have_count(0)
    page.message.fill("twice?")
    page.page.keyboard.press("Enter")
    page.page.keyboard.press("Enter")
    page.finished(0)
    expect(page.questions).to_have_count(1)
    page.message.fill("a line")
    page.page.keyboard.press("Shift+Enter")
    page.page.keyboard.type("and another")
    page.message.press("Enter")
    expect(page.questions.nth(1)).to_have_text("a line\nand another", use_inner_text=True)
    page.finished(1)

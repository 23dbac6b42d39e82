"""The table of sessions and the plots, fed by the console's own chat and by other clients."""

import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, expect

from kakeya.config import RuntimeConfig, StateConfig
from kakeya.runtime import Runtime
from support.browser import PATIENCE_MS, Console, console
from support.http_serving import serving_http
from support.serving import ENGINE

WINDOW, SINK = 30, 2


@pytest.fixture
def agent(runtime: Runtime) -> Iterator[str]:
    """A session of another client, with a window that is full."""
    session_id = runtime.create_session(client_label="agent seven", eos_token_ids=())
    for _ in range(4):
        turn(runtime, session_id)
    yield session_id
    if any(info.session_id == session_id for info in runtime.list_sessions()[0]):
        runtime.close_session(session_id)


def turn(runtime: Runtime, session_id: str) -> None:
    runtime.append(session_id, [5, 6, 7, 8])
    list(runtime.generate(session_id, 9))


def heights(line: Locator) -> list[float]:
    """The y coordinates of a plotted line; a smaller one is higher up."""
    path = line.get_attribute("d") or ""
    return [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", path)]


def test_the_sessions_of_other_clients_are_listed_live(page: Console, runtime: Runtime, agent: str) -> None:
    row = page.rows.filter(has_text="agent seven")
    expect(row).to_have_count(1)
    expect(row.locator(".state")).to_have_text("idle")
    number = lambda title: row.locator(f"[data-title='{title}']")  # noqa: E731
    expect(number("History")).to_have_text("52")
    expect(number("Dropped")).to_have_text("20")
    expect(number("Turns")).to_have_text("4")
    info = runtime.info(agent)
    expect(number("KV")).to_have_text(f"{info.kv_live_bytes / 1024:.3g} KiB")
    expect(number("Idle")).to_have_text(re.compile(r"\d+ (m?s)"))
    turn(runtime, agent)
    expect(number("History")).to_have_text("65")
    expect(number("Dropped")).to_have_text("33")
    expect(number("Turns")).to_have_text("5")
    runtime.close_session(agent)
    expect(row).to_have_count(0)


def test_a_running_session_shows_its_rate(page: Console, runtime: Runtime, agent: str) -> None:
    row = page.rows.filter(has_text="agent seven")
    stream = runtime.generate(agent, 100_000)
    now = page.page.locator("#rate-now")
    until = time.monotonic() + PATIENCE_MS / 1000
    writes = re.compile(r"^[1-9][\d.,]* tokens/s, 1 session writes$")
    while not (row.locator(".live").count() and writes.match(now.text_content() or "")):
        assert time.monotonic() < until, "the page did not see the session write"
        for _ in range(20):
            stream.next_event()
    expect(row.locator(".state")).to_have_text("writing")
    stream.cancel()
    list(stream)
    expect(row.locator(".state")).to_have_text("idle")
    assert min(heights(page.page.locator(".line.rate"))) < max(heights(page.page.locator(".line.rate")))


def test_every_turn_becomes_a_point_and_the_lines_are_flat(page: Console) -> None:
    plot = page.page.locator("#turns-plot")
    expect(plot.locator(".dot")).to_have_count(0)
    for number in range(1, 7):
        page.turn(f"question number {number}")
        expect(plot.locator(".dot.latency")).to_have_count(number)
    for kind in ("history", "each", "memory"):
        expect(plot.locator(f".dot.{kind}")).to_have_count(6)
    climbing = heights(plot.locator(".line.history"))
    assert climbing == sorted(climbing, reverse=True)
    assert climbing[-1] < climbing[0] - 20
    level = heights(plot.locator(".line.memory"))
    # The newest token is computed with the next turn, so it is not in memory yet.
    full = next(n for n, tokens in enumerate(histories(page)) if tokens > WINDOW + SINK)
    assert len(level[full:]) >= 3
    assert set(level[full:]) == {level[-1]}
    verdict = page.page.locator("#verdict")
    expect(verdict).to_contain_text("with a full window")
    expect(verdict.locator(".memory")).to_have_text("1.00×")


def histories(page: Console) -> list[int]:
    """History lengths turn by turn, read off the plot with the keyboard."""
    readout = page.page.locator("#turns-readout")
    page.page.locator("#turns-plot").focus()
    page.page.keyboard.press("Home")
    lengths = []
    for _ in range(6):
        told = [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*", readout.text_content() or "")]
        _, _, prompt, written = told[:4]
        lengths.append(prompt + written)
        page.page.keyboard.press("ArrowRight")
    return lengths


def test_a_row_can_be_chosen_for_the_plot(page: Console, agent: str) -> None:
    page.turn("my own session")
    plot = page.page.locator("#turns-plot")
    expect(plot.locator(".dot.latency")).to_have_count(1)
    page.button("agent seven").click()
    expect(page.page.locator("#turns-title")).to_have_text("Every turn of “agent seven”")
    expect(plot.locator(".dot.latency")).to_have_count(4)
    page.button("Back to the chat").click()
    expect(plot.locator(".dot.latency")).to_have_count(1)


def test_points_survive_a_reload(page: Console) -> None:
    page.turn("once")
    page.turn("twice")
    page.page.reload()
    page.talks.first.click()
    expect(page.page.locator("#turns-plot .dot.latency")).to_have_count(2)


def test_the_plot_follows_the_pointer(page: Console) -> None:
    page.turn("one")
    page.turn("two")
    plot = page.page.locator("#turns-plot")
    expect(plot.locator(".dot.latency")).to_have_count(2)
    readout = page.page.locator("#turns-readout")
    expect(readout).to_contain_text("Turn 2:")
    plot.hover(position={"x": 60, "y": 80})
    expect(readout).to_contain_text("Turn 1:")
    page.message.hover()
    expect(readout).to_contain_text("Turn 2:")


def test_sleeping_sessions_are_told_of(browser: Browser, model: Path, tmp_path: Path) -> None:
    sessions = RuntimeConfig(state=StateConfig(tmp_path))
    with (
        serving_http(model, engine=replace(ENGINE, capacity=1), sessions=sessions) as (server, runtime),
        console(browser, server.url) as page,
    ):
        for label in ("early bird", "night owl"):
            turn(runtime, runtime.create_session(client_label=label, eos_token_ids=()))
        expect(page.rows.filter(has_text="early bird").locator(".state")).to_have_text("host")
        expect(page.rows.filter(has_text="night owl").locator(".state")).to_have_text("idle")
        summary = page.page.locator("#sessions-now")
        expect(summary).to_contain_text(re.compile(r"1 asleep in memory \(\d.* KiB\), 0 on disk"))
        expect(summary).not_to_contain_text("waking")
        early = next(info for info in runtime.list_sessions()[0] if info.client_label == "early bird")
        runtime.append(early.session_id, [])
        expect(summary).to_contain_text(re.compile(r"waking takes .*s, a crash would cost \d+ tokens"))

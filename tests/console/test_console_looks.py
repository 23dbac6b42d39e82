"""The page on a desk and on a phone, by day and by night, by keyboard alone."""

import re

import pytest
from playwright.sync_api import Browser, expect

from support.browser import DESKTOP, PHONE, Console, console

SIZES = {"desktop": DESKTOP, "phone": PHONE}

_CONTRAST = """
([ink, ground]) => {
  const probe = document.createElement('canvas').getContext('2d');
  const light = (name) => {
    probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
    probe.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...probe.getImageData(0, 0, 1, 1).data].map((part) => {
      const value = part / 255;
      return value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [dark, bright] = [light(ink), light(ground)].sort((a, b) => a - b);
  return (bright + 0.05) / (dark + 0.05);
}
"""
_PAIRS = [
    ("--ink", "--page"),
    ("--ink", "--card"),
    ("--ink", "--accent-wash"),
    ("--soft", "--page"),
    ("--soft", "--card"),
    ("--soft", "--sunken"),
    ("--accent-ink", "--accent"),
    ("--accent", "--card"),
    ("--latency", "--card"),
    ("--memory", "--card"),
    ("--rate", "--card"),
    ("--bad", "--card"),
    ("--bad", "--bad-wash"),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_turn_works_and_fits_everywhere(browser: Browser, url: str, size: str, scheme: str) -> None:
    with console(browser, url, SIZES[size], scheme) as page:
        page.turn(
            "a question that is rather longer than a telephone is wide, and has averylongword" + "x" * 80
        )
        assert page.page.evaluate("document.documentElement.dataset.theme") == scheme
        views = ("Chat", "Figures", "Conversations") if size == "phone" else ("",)
        for view in views:
            if view:
                page.button(view).click()
            assert page.overflow() <= 0
            assert _sticking_out(page) == []
        for ink, ground in _PAIRS:
            assert page.page.evaluate(_CONTRAST, [ink, ground]) >= 4.5, f"{ink} on {ground}"


def _sticking_out(page: Console) -> list[str]:
    """Elements that reach over the right edge of the window, whoever hides it."""
    found: list[str] = page.page.evaluate(
        """() => [...document.querySelectorAll('main *, header *, .tabs *')]
          .filter((node) => node.getClientRects().length && !node.closest('.hidden, thead'))
          .filter((node) => node.getBoundingClientRect().right > innerWidth + 1)
          .map((node) => `${node.tagName}.${node.className}`)"""
    )
    return found


def test_a_phone_shows_one_room_at_a_time(browser: Browser, url: str) -> None:
    with console(browser, url, PHONE) as page:
        page.turn("on the way")
        expect(page.rows.first).to_be_hidden()
        strip = page.page.locator("#strip")
        expect(strip).to_have_text(re.compile(r"history \d+ · first token .+ · KV .+"))
        strip.click()
        expect(page.page.locator("#turns-plot svg")).to_be_visible()
        expect(page.rows.first).to_be_visible()
        expect(page.message).to_be_hidden()
        page.button("Conversations").click()
        page.talks.first.click()
        expect(page.message).to_be_visible()
        expect(page.answers).to_have_count(1)


def test_the_theme_can_be_turned_and_is_remembered(browser: Browser, url: str) -> None:
    with console(browser, url, scheme="dark") as page:
        theme = "document.documentElement.dataset.theme"
        ground = "getComputedStyle(document.body).backgroundColor"
        night = page.page.evaluate(ground)
        page.button("Light").click()
        assert page.page.evaluate(theme) == "light"
        assert page.page.evaluate(ground) != night
        page.page.reload()
        assert page.page.evaluate(theme) == "light"
        page.button("Dark").click()
        page.page.emulate_media(color_scheme="light")
        # Back at the system's choice, it follows the system again.
        expect(page.page.locator("html")).to_have_attribute("data-theme", "light")


def test_everything_works_by_keyboard_alone(browser: Browser, url: str) -> None:
    with console(browser, url) as page:
        _use_keyboard(page)


def _use_keyboard(page: Console) -> None:
    keyboard = page.page.keyboard
    expect(page.message).to_be_focused()
    keyboard.type("typed")
    keyboard.press("Enter")
    page.finished(0)
    keyboard.press("Alt+n")
    expect(page.answers).to_have_count(0)
    keyboard.type("second talk")
    keyboard.press("Enter")
    page.finished(0)
    expect(page.questions).to_have_text(["second talk"])
    keyboard.press("Alt+ArrowDown")
    expect(page.questions).to_have_text(["typed"])
    keyboard.press("Alt+ArrowUp")
    expect(page.questions).to_have_text(["second talk"])
    keyboard.press("Alt+k")
    expect(page.page.get_by_text("Forked here")).to_be_visible()
    expect(page.message).to_be_focused()
    page.button("Shortcuts").focus()
    keyboard.press("Enter")
    expect(page.page.get_by_role("dialog")).to_contain_text("By keyboard")
    keyboard.press("Escape")
    expect(page.page.get_by_role("dialog")).to_be_hidden()


def test_tab_reaches_every_control_and_shows_where_it_is(page: Console) -> None:
    page.turn("something to fork and delete")
    expect(page.rows).not_to_have_count(0)
    reached = set()
    for _ in range(60):
        page.page.keyboard.press("Tab")
        name, outline = page.page.evaluate(
            """() => [
              document.activeElement.id || document.activeElement.className || document.activeElement.tagName,
              getComputedStyle(document.activeElement).outlineStyle,
            ]"""
        )
        assert outline != "none" or name == "BODY", name
        reached.add(name)
    wanted = {"theme-button", "help-button", "new-button", "talk", "fork-button", "delete-button", "log"}
    wanted |= {"message", "send-button", "turns-plot", "row-name", "skip"}
    assert wanted <= reached


def test_every_control_has_a_name(page: Console) -> None:
    nameless = page.page.evaluate(
        """() => [...document.querySelectorAll('button, input, textarea, [role=img], table, dialog')]
          .filter((node) => !(node.textContent.trim() && node.matches('button')) && !node.labels?.length
            && !node.getAttribute('aria-label') && !node.getAttribute('aria-labelledby'))
          .map((node) => node.id)"""
    )
    assert [name for name in nameless if name != "strip"] == []


def test_motion_is_reduced_on_request(browser: Browser, url: str) -> None:
    with console(browser, url, reduced_motion="reduce", longest=100_000) as page:
        page.ask("keep writing")
        page.growing(0)
        animation = "getComputedStyle(document.querySelector('.writing .said'), '::after').animationName"
        assert page.page.evaluate(animation) == "none"
        page.button("Stop").click()
        page.finished(0)

"""Debian's Chromium on the console, watched: nothing may break, be forbidden or leave the server."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from support.http_serving import eventually

CHROMIUM = Path("/usr/bin/chromium")
DESKTOP, PHONE = (1280, 800), (390, 844)
# Far more than anything here takes; a machine may be busy.
PATIENCE_MS = 15_000

_WATCH = """
window.violations = [];
addEventListener('securitypolicyviolation', (event) => {
  window.violations.push(`${event.violatedDirective}: ${event.blockedURI} ${event.sample}`);
});
"""
_SETTINGS = """
for (const [name, value] of Object.entries(%s)) {
  if (sessionStorage.getItem(`kakeya-${name}`) === null) sessionStorage.setItem(`kakeya-${name}`, value);
}
"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser. It is needed: without it the console is not tested."""
    if not CHROMIUM.exists():
        pytest.fail(f"{CHROMIUM} is missing; the console is tested in it: apt-get install chromium")
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


class Console:
    """The page as a person uses it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.message = page.get_by_label("Message", exact=True)
        self.answers = page.locator(".message.assistant")
        self.questions = page.locator(".message.user")
        self.talks = page.locator(".talk")
        self.rows = page.locator("#session-rows tr")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def ask(self, text: str) -> None:
        """Type a message and send it, as a keyboard does."""
        self.message.fill(text)
        self.message.press("Enter")

    def turn(self, text: str) -> str:
        """Ask and wait for the whole answer; what it says."""
        number = self.answers.count()
        self.ask(text)
        self.finished(number)
        return self.said(number)

    def finished(self, number: int) -> None:
        expect(self.answers.nth(number).locator("p.about")).to_be_attached()
        expect(self.button("Send")).to_be_visible()

    def said(self, number: int) -> str:
        return self.answers.nth(number).locator(".said").text_content() or ""

    def growing(self, number: int) -> None:
        """Wait until more of an answer has come."""
        length = len(self.said(number))
        eventually(lambda: len(self.said(number)) > length)

    def set(self, label: str, value: str) -> None:
        """Fill in one of the settings."""
        settings = self.page.locator("details.settings")
        if settings.get_attribute("open") is None:
            settings.locator("summary").click()
        field = settings.get_by_label(label)
        field.fill(value)
        field.blur()
        settings.locator("summary").click()

    def cell(self, row: int, title: str) -> Locator:
        return self.rows.nth(row).locator(f"[data-title='{title}']")

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        width: int = self.page.evaluate("document.documentElement.scrollWidth - innerWidth")
        return width


@contextmanager
def console(
    browser: Browser,
    url: str,
    size: tuple[int, int] = DESKTOP,
    scheme: str = "light",
    longest: int = 12,
    **options: object,
) -> Iterator[Console]:
    """The console in a fresh profile, set to repeatable answers of at most `longest` tokens.

    At the end nothing must have gone wrong on it.
    """
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, **options)
    context.set_default_timeout(PATIENCE_MS)
    context.add_init_script(_WATCH)
    settings = {"temperature": "0", "repetition-penalty": "", "max-tokens": str(longest)}
    context.add_init_script(_SETTINGS % json.dumps(settings))
    page = context.new_page()
    errors: list[str] = []
    strangers: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(f"dialog: {dialog.message}") or dialog.dismiss())
    page.on("request", lambda request: strangers.append(request.url) if foreign(request.url, url) else None)
    page.goto(url)
    try:
        yield Console(page)
        assert errors == []
        assert strangers == []
        assert page.evaluate("window.violations") == []
    finally:
        context.close()


def foreign(requested: str, url: str) -> bool:
    return not requested.startswith(f"{url.rstrip('/')}/")

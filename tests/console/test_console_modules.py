"""The console's small modules on their own, in the browser they run in."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from support.browser import Console, console

_READ_BY_BYTES = """
async ([text, size]) => {
  const { events } = await import('/console/sse.js');
  const bytes = new TextEncoder().encode(text);
  const body = new ReadableStream({
    start(controller) {
      for (let at = 0; at < bytes.length; at += size) controller.enqueue(bytes.slice(at, at + size));
      controller.close();
    },
  });
  const read = [];
  for await (const event of events(body)) read.push(event);
  return read;
}
"""


@pytest.fixture(scope="module")
def idle(browser: Browser, url: str) -> Iterator[Console]:
    with console(browser, url) as page:
        yield page


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_events_survive_any_cutting_of_the_stream(idle: Console, size: int, end: str) -> None:
    lines = (
        'event: first|data: {"text": "Grüße, 日本語 \\n"}||: a comment||'
        'data: {"more":|data: [1, 2]}||data:{"tight": 1}||data: [DONE]||data: {"late": 1}||'
    )
    read = idle.page.evaluate(_READ_BY_BYTES, [lines.replace("|", end), size])
    assert read == [{"text": "Grüße, 日本語 \n"}, {"more": [1, 2]}, {"tight": 1}]


@pytest.mark.parametrize(
    "call, text",
    [
        ("memory(0)", "0 B"),
        ("memory(999)", "999 B"),
        ("memory(1023)", "1 KiB"),
        ("memory(23592960)", "22.5 MiB"),
        ("memory(2.15 * 2 ** 30)", "2.15 GiB"),
        ("memory(5e15)", "4,547 TiB"),
        ("duration(0.0084)", "8.4 ms"),
        ("duration(0.052)", "52 ms"),
        ("duration(0.99996)", "1 s"),
        ("duration(1.239)", "1.24 s"),
        ("duration(200)", "3 min"),
        ("duration(7300)", "2.03 h"),
        ("times(1)", "1.00×"),
        ("times(3.14)", "3.1×"),
        ("times(123.4)", "123×"),
        ("count(1234567.8)", "1,234,568"),
        ("modelName('/a/b/some-model/')", "some-model"),
        ("modelName('plain')", "plain"),
    ],
)
def test_numbers_as_people_read_them(idle: Console, call: str, text: str) -> None:
    said = idle.page.evaluate(f"async () => (await import('/console/format.js')).{call}")
    assert said == text


@pytest.mark.parametrize(
    "value, top", [(0, 1), (0.7, 0.8), (1, 1), (1.01, 1.5), (28.2, 30), (121, 150), (9001, 1e4)]
)
def test_axes_end_at_round_numbers(idle: Console, value: float, top: float) -> None:
    found = idle.page.evaluate(f"async () => (await import('/console/plot.js')).roundTop({value})")
    assert found == pytest.approx(top)


def test_the_verdict_says_what_the_turns_show(idle: Console) -> None:
    told = """
    async ([histories, span]) => {
      const { verdict } = await import('/console/turns.js');
      const turns = histories.map((history_length, place) => ({
        number: place + 1, history_length, first_token_seconds: place === 1 ? 9 : 0.05,
        kv_live_bytes: 10 * Math.min(history_length - 1, span),
      }));
      return verdict(turns, span).map((part) => part.textContent ?? part).join('');
    }
    """

    def verdict(*histories: int) -> str:
        said: str = idle.page.evaluate(told, [list(histories), 100])
        return said

    assert verdict().startswith("Every turn becomes a point")
    assert verdict(51).startswith("The window is 50 % full")
    assert verdict(51, 100).startswith("The window is 99 % full")
    assert verdict(51, 101).startswith("The window is full")
    grown = "Since turn 3, with a full window: history 3.0×, first token 1.00×, memory 1.00×."
    assert verdict(51, 100, 110, 220, 330) == grown

"""Plain paragraphs out of HTML pages. Pure."""

from html.parser import HTMLParser

# Text does not run on across the edges of these.
_BLOCKS = frozenset((
    "address", "article", "aside", "blockquote", "body", "br", "caption", "dd", "div", "dl", "dt",
    "footer", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "ol", "p",
    "section", "table", "tbody", "td", "th", "tr", "ul",
))  # fmt: skip
# What these hold is not prose.
_LEFT_OUT = frozenset(("head", "nav", "pre", "script", "style", "table"))
LEAST_WORDS = 8
_SENTENCE_ENDS = tuple('.!?:;…)”"')


class _Paragraphs(HTMLParser):
    """Collects runs of text between the edges of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._pieces: list[str] = []
        self._left_out = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._edge(tag)
        self._left_out += tag in _LEFT_OUT

    def handle_endtag(self, tag: str) -> None:
        self._edge(tag)
        if tag in _LEFT_OUT:
            self._left_out = max(0, self._left_out - 1)

    def handle_data(self, data: str) -> None:
        if not self._left_out:
            self._pieces.append(data)

    def close(self) -> None:
        super().close()
        self._end()

    def _edge(self, tag: str) -> None:
        if tag in _BLOCKS or tag in _LEFT_OUT:
            self._end()

    def _end(self) -> None:
        words = "".join(self._pieces).split()
        self._pieces = []
        if len(words) >= LEAST_WORDS and words[-1].endswith(_SENTENCE_ENDS):
            self.found.append(" ".join(words))


def paragraphs(page: str) -> list[str]:
    """The paragraphs of a page that are prose: whole sentences, no headings, menus, tables or listings."""
    parser = _Paragraphs()
    parser.feed(page)
    parser.close()
    return parser.found


class _Links(HTMLParser):
    """Collects where links lead, each page once."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: dict[str, None] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        target = dict(attrs).get("href") if tag == "a" else None
        if target and (name := target.partition("#")[0]):
            self.pages.setdefault(name)


def linked_pages(index: str) -> list[str]:
    """The pages that a table of contents leads to, in its order."""
    parser = _Links()
    parser.feed(index)
    parser.close()
    return list(parser.pages)

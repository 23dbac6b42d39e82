"""The metrics of several homes as one exposition: every sample says which home it is of."""

import re
from collections.abc import Iterator, Mapping

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (.*)")
_ABOUT = re.compile(r"# (?:HELP|TYPE) (\S+)")


def labelled(texts: Mapping[str, str]) -> str:
    """The texts of homes by their names, each sample with a label `home`. A metric is described once, and all
    homes' samples of it follow, as the format wants."""
    about: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for home, text in texts.items():
        for metric, line in _lines(text):
            if line.startswith("#"):
                known = about.setdefault(metric, [])
                if line not in known:
                    known.append(line)
            else:
                samples.setdefault(metric, []).append(_with_home(line, home))
    return "".join(f"{line}\n" for metric in about for line in (*about[metric], *samples.get(metric, ())))


def _lines(text: str) -> Iterator[tuple[str, str]]:
    """Each line with the metric that was last described before it."""
    metric = ""
    for line in text.splitlines():
        described = _ABOUT.match(line)
        if described is not None:
            metric = described[1]
        if described is not None or not line.startswith("#"):
            yield metric, line


def _with_home(line: str, home: str) -> str:
    found = _SAMPLE.fullmatch(line)
    if found is None:
        return line
    name, labels, value = found.groups()
    return f'{name}{{home="{home}"{"," + labels if labels else ""}}} {value}'

"""Files of prefixes that are computed at the start."""

import pytest

from kakeya.errors import ConfigError
from kakeya.text.warm_prefixes import WarmPrefix, parse_prefixes


def test_each_line_is_one() -> None:
    written = """{"text": "Once upon"}

{"messages": [{"role": "system", "content": "Be brief."}], "tools": [{"type": "function"}]}
"""
    assert parse_prefixes(written, "file") == [
        WarmPrefix("Once upon"),
        WarmPrefix(messages=({"role": "system", "content": "Be brief."},), tools=({"type": "function"},)),
    ]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "not a JSON object"),
        ("[1]", "not a JSON object"),
        ('{"txt": "a"}', "unknown name 'txt'"),
        ("{}", "either a text or messages"),
        ('{"text": 3}', "either a text or messages"),
        ('{"text": "a", "messages": [{}]}', "either a text or messages"),
        ('{"messages": "hello"}', "messages must be a list of JSON objects"),
        ('{"messages": [3]}', "messages must be a list of JSON objects"),
        ('{"messages": [{}], "tools": {"a": 1}}', "tools must be a list of JSON objects"),
    ],
)
def test_a_wrong_line_is_named(line: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=f"file, line 2: .*{fault}"):
        parse_prefixes('{"text": "fine"}\n' + line, "file")

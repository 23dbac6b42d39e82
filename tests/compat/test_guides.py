"""The examples of the guides do what they say."""

import re
from pathlib import Path

import pytest

from support.clients import KEY, REMEMBERED, Served
from support.programs import run_node, run_python

GUIDES = Path(__file__).parents[2] / "docs/guides"
EXAMPLE = re.compile(r"^```(python|js)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(guide: str, language: str, served: Served) -> str:
    """All examples of a language as one program: later ones use what earlier ones made."""
    text = (GUIDES / guide).read_text()
    found = [code for kind, code in EXAMPLE.findall(text) if kind == language]
    assert found
    host = served.url.removesuffix("/v1")
    return "\n".join(found).replace("http://127.0.0.1:8000", host).replace('"none"', f'"{KEY}"')


def test_the_python_examples_for_openais_clients_run(served: Served) -> None:
    told = run_python("-c", examples("openai.md", "python", served))
    assert re.search(r"^[1-9]\d* tokens of the history were not computed again$", told, re.MULTILINE)
    assert f"0 tokens dropped; {REMEMBERED} are remembered" in told


@pytest.mark.usefixtures("node_modules")
def test_the_javascript_examples_for_openais_clients_run(served: Served) -> None:
    told = run_node("--input-type=module", "--eval", examples("openai.md", "js", served))
    assert "get_weather" in told


def test_the_examples_for_anthropics_clients_run(served: Served) -> None:
    told = run_python("-c", examples("anthropic.md", "python", served))
    assert re.search(r"^[1-9]\d* tokens were not computed again$", told, re.MULTILINE)

"""The examples of the guide do what it says."""

import re
from pathlib import Path

import pytest

from support.clients import KEY, REMEMBERED, Served
from support.programs import run_node, run_python

GUIDE = Path(__file__).parents[2] / "docs/guides/openai.md"
EXAMPLE = re.compile(r"^```(python|js)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples(language: str, served: Served) -> str:
    """All examples of a language as one program: later ones use what earlier ones made."""
    found = [code for kind, code in EXAMPLE.findall(GUIDE.read_text()) if kind == language]
    assert len(found) > 1
    program = "\n".join(found).replace("http://127.0.0.1:8000/v1", served.url)
    return program.replace('"none"', f'"{KEY}"')


def test_the_python_examples_run(served: Served) -> None:
    told = run_python("-c", examples("python", served))
    assert re.search(r"^[1-9]\d* tokens of the history were not computed again$", told, re.MULTILINE)
    assert f"0 tokens dropped; {REMEMBERED} are remembered" in told


@pytest.mark.usefixtures("node_modules")
def test_the_javascript_examples_run(served: Served) -> None:
    told = run_node("--input-type=module", "--eval", examples("js", served))
    assert "get_weather" in told

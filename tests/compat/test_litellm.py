"""LiteLLM, which many tools call models through."""

from pathlib import Path

from support.clients import KEY, Served
from support.programs import run_python


def test_litellm(served: Served) -> None:
    run_python(str(Path(__file__).with_name("litellm_calls.py")), served.url, served.model, KEY)
